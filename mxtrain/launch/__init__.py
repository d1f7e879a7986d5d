"""scripts/launch.py: many processes of one training, on this host or several.

It imports no mxnet. What a process that it starts finds in its environment:

    MXTRAIN_LAUNCH      "ps" or "horovod"
    MXTRAIN_RANK        0 to MXTRAIN_SIZE - 1, in the order of the hosts file. With the parameter server `kv.rank` is
                        another number: its scheduler numbers workers by address and port. Rank 0 is the one that
                        writes files and shows progress; it runs on the first host.
    MXTRAIN_SIZE        number of workers of this start; with --min-workers it may differ from start to start
    MXTRAIN_LOCAL_RANK  0 to MXTRAIN_LOCAL_SIZE - 1, among the workers of its host
    MXTRAIN_LOCAL_SIZE
    MXTRAIN_RESTART     0 at the first start, 1 at the first restart ...
    MXTRAIN_RESUME      run folder of the start before, from the first restart on and only if one was announced
    MXTRAIN_PROCESS     a mark by which what it starts is found and ended after it

and PYTHONUNBUFFERED, and DMLC_* (parameter server) or HOROVOD_* (Horovod), as MXNet and Horovod read them.

What the launcher expects of a worker (mxtrain.launch.worker has both sides' functions):

- Rank 0 announces its run folder as soon as it exists. The line goes through stderr, so that no file system has to
  be shared with the launcher, which takes it out of the output.
- With MXTRAIN_RESUME, the worker goes on in that folder from its last complete checkpoint, and starts anew in that
  folder when there is none yet. The command line is the same at every start.
- Exit code 0: done. 2: a user's mistake, so no restart. 128 + n after signal n, which saves first. LOST_PEER (75):
  ended only because another process had gone; the launcher then looks for the cause elsewhere.
- With the parameter server, a failing worker must not wait for the others at the end of Python, as MXNet has it: they
  wait for this one. mxtrain's own store is told not to; a program with a store of its own ends by os._exit
  (mxtrain.launch.worker.leave).
- SIGINT, SIGTERM, SIGHUP: save and end. After a failure elsewhere it is SIGTERM too, and SIGKILL --grace seconds
  later. No worker gets a second one of them from here; what comes within 2 seconds of the first, from a system that
  signals all processes of a job, is to be taken for the same. Scheduler and servers pass over all of them.
"""
