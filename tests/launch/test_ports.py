"""Ports: free ones, those in use, and those that another launch is about to use."""

import socket

import pytest
from mxtrain.errors import UserError
from mxtrain.launch.ports import Port

HERE = "127.0.0.1"


def test_a_free_port_can_be_listened_on():
    port = Port(HERE, None)
    with socket.create_server((HERE, port.number)):
        pass
    port.close()


def test_a_port_in_use():
    with socket.create_server((HERE, 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {number}: is in use on {HERE}; give another one"):
            Port(HERE, number)
    Port(HERE, number).close()


def test_two_launches_cannot_have_one_port_before_anybody_listens():
    first = Port(HERE, None)
    with pytest.raises(UserError, match=f"--port {first.number}: is in use"):
        Port(HERE, first.number)
    first.close()
    Port(HERE, first.number).close()


def test_an_address_of_another_machine():
    with pytest.raises(UserError, match="--port 80: cannot be used"):
        Port("198.51.100.1", 80)
