"""The lock between loop and model thread: who waits is next, and who has it may take it again."""

from __future__ import annotations

import threading

from transfer.fair_lock import FairLock

LIMIT_S = 5.0


def test_who_waits_is_next_though_the_owner_asks_again_at_once() -> None:
    lock = FairLock()
    for _ in range(50):
        had: list[str] = []

        def wait(had: list[str] = had) -> None:
            with lock:
                had.append("who waited")

        with lock:
            waiting = threading.Thread(target=wait)
            waiting.start()
            while not lock._place_in_front.locked():
                pass
        with lock:
            had.append("who had it")
        waiting.join(LIMIT_S)
        assert had == ["who waited", "who had it"]


def test_its_owner_takes_it_again_though_another_waits() -> None:
    lock = FairLock()
    entered = threading.Event()

    def wait() -> None:
        with lock:
            entered.set()

    with lock:
        waiting = threading.Thread(target=wait)
        waiting.start()
        while not lock._place_in_front.locked():
            pass
        with lock, lock:
            pass
        assert not entered.is_set(), "left inside, it is still held outside"
    assert entered.wait(LIMIT_S)
    waiting.join(LIMIT_S)


def test_an_error_inside_gives_it_back() -> None:
    lock = FairLock()
    try:
        with lock, lock:
            raise ValueError
    except ValueError:
        pass
    free: list[bool] = []

    def take() -> None:
        with lock:
            free.append(True)

    taking = threading.Thread(target=take, daemon=True)
    taking.start()
    taking.join(LIMIT_S)
    assert free
