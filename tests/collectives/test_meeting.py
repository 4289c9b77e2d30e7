"""Processes that meet, as threads: who is missing, twice there, a stranger, or in another job."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshpar.collectives.between.meeting import meet
from meshpar.errors import CollectiveError


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def together(address, ranks, timeout=20.0):
    """What each (rank, size) gets from its meeting, or its error."""

    def one(rank, size):
        try:
            return meet(address, rank, size, timeout)
        except CollectiveError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        found = [future.result() for future in [pool.submit(one, *rank) for rank in ranks]]
    for lines in found:
        for line in lines.values() if isinstance(lines, dict) else ():
            line.close()
    return found


def test_all_come_in_any_order(address):
    found = together(address, [(2, 4), (1, 4), (3, 4), (0, 4)])
    assert set(found[3]) == {1, 2, 3} and [set(x) for x in found[:3]] == [{0}] * 3


def test_missing_ranks_are_named_everywhere(address):
    found = together(address, [(0, 5), (2, 5)], timeout=3.0)
    assert all("ranks 1, 3, 4 of 5 did not come within 3 s" in text for text in found)


def test_without_rank_0(address):
    assert "rank 0 of 2 did not come within 1 s" in together(address, [(1, 2)], timeout=1.0)[0]


def test_two_processes_of_one_rank(address):
    found = together(address, [(0, 3), (1, 3), (1, 3)], timeout=5.0)
    assert all("two processes say that they are rank 1" in text for text in found)


def test_two_numbers_of_processes(address):
    found = together(address, [(0, 2), (1, 3)], timeout=5.0)
    assert all("rank 0 was told of 2 processes, rank 1 of 3" in text for text in found)


def test_a_taken_port_is_an_error_in_seconds(address):
    port = int(address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        start = time.monotonic()
        assert "another program listens there" in together(address, [(0, 2)], timeout=1.0)[0]
        assert time.monotonic() - start < 5


def test_another_program_at_the_port_is_not_rank_0(address):
    port = int(address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)) as server:

        def answer():
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        assert "no meshpar process" in together(address, [(1, 2)], timeout=5.0)[0]
        thread.join()


def test_strangers_do_not_disturb(address):
    """A port scanner comes, says something else and goes; so does a rank that starts again."""
    host, _, port = address.rpartition(":")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(together, address, [(0, 4), (2, 4)])
        for words in (
            b"GET / HTTP/1.1\r\n\r\n",
            b'{"magic": "meshpar 1", "rank": 1, "size": 4}\n',
            b"[]\n",
            b"\xff\n",
        ):
            while True:
                try:
                    with socket.create_connection((host, int(port))) as stranger:
                        stranger.sendall(words)
                        time.sleep(0.1)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
        assert isinstance(together(address, [(1, 4), (3, 4)])[0], dict)
        assert set(first.result()[0]) == {1, 2, 3}


def test_an_address_without_a_port():
    with pytest.raises(CollectiveError, match="no host:port"):
        meet("localhost", 0, 2, 1.0)
