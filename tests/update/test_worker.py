import threading
import time

import pytest

from lightning_megatrain.update.worker import Worker


def test_tasks_run_in_order_on_one_thread_of_their_own() -> None:
    worker, seen, threads = Worker(), [], set()

    def task(i: int) -> None:
        time.sleep(0.001)
        seen.append(i)
        threads.add(threading.current_thread())

    for i in range(20):
        worker.submit(i % 3, lambda i=i: task(i))
    worker.wait()
    assert seen == list(range(20))
    assert len(threads) == 1
    assert threading.current_thread() not in threads
    worker.close()
    assert not any(t.is_alive() for t in threads)


def test_wait_for_one_key() -> None:
    worker, gate, done = Worker(), threading.Event(), []
    worker.submit(0, lambda: done.append(0))
    worker.submit(1, gate.wait)
    worker.wait(0)
    assert done == [0]
    gate.set()
    worker.close()


def test_an_exception_is_raised_once_as_itself_and_stops_what_follows() -> None:
    worker, ran = Worker(), []
    error = ZeroDivisionError("planted")

    def fail() -> None:
        raise error

    worker.submit(0, fail)
    worker.submit(1, lambda: ran.append(1))
    with pytest.raises(ZeroDivisionError) as caught:
        worker.wait()
    assert caught.value is error
    worker.wait()  # said once
    assert worker.failed is error
    assert ran == []
    with pytest.raises(RuntimeError, match="half-way"):
        worker.submit(2, lambda: None)
    worker.close()
    worker.close()
