"""Where samples come from, their order, their pixels, and how they become global batches.

Kept empty of imports: `mxtrain.data.settings` must load without mxnet.
"""
