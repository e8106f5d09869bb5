"""Processes that meet, or say who did not come: with threads, on free ports."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedbnr_jax.errors import InputError
from fedbnr_jax.run import meeting
from fedbnr_jax.run.local_processes import free_port

HOST = "127.0.0.1"
LIMIT = 20.0  # Far above what any test needs: reaching it is a failure.


@pytest.fixture(autouse=True)
def _nothing_is_logged(caplog):
  """The user would see what asyncio logs."""
  yield
  for when in ("setup", "call"):
    assert [record.getMessage() for record in caplog.get_records(when)] == []


def _meet(port, number, count, wait_seconds=LIMIT, host=HOST, word=""):
  meeting.meet(meeting.Place(host, port, wait_seconds, word), number, count)


def _meet_all(port, peers, wait_seconds=LIMIT, strangers=(), word=""):
  """What each peer (number, count) is told: None to go on, or the refusal."""

  def meet(peer):
    try:
      _meet(port, *peer, wait_seconds, word=word)
    except InputError as error:
      return str(error)
    return None

  with ThreadPoolExecutor(len(peers) + 1) as pool:
    first = [pool.submit(meet, peer) for peer in peers if peer[0] == 0]
    with contextlib.ExitStack() as stack:
      for words in strangers:
        stack.enter_context(_stranger(port, words))
      others = [pool.submit(meet, peer) for peer in peers if peer[0] != 0]
      answers = [one.result(LIMIT) for one in first + others]
  assert not any(refusal and "\n" in refusal for refusal in answers)
  return answers


def _connected(port):
  """A connection, once somebody listens."""
  deadline = time.monotonic() + LIMIT
  while True:
    try:
      return socket.create_connection((HOST, port), timeout=1.0)
    except OSError:
      assert time.monotonic() < deadline
      time.sleep(0.01)


@contextlib.contextmanager
def _stranger(port, words):
  with _connected(port) as peer:
    with contextlib.suppress(OSError):
      peer.sendall(words)
    yield peer


def _line(**content):
  return json.dumps(content).encode() + b"\n"


@pytest.mark.parametrize("count", [2, 5])
def test_all_that_come_go_on(count):
  start = time.monotonic()
  answers = _meet_all(free_port(), [(n, count) for n in range(count)])
  assert answers == [None] * count
  assert time.monotonic() - start < LIMIT / 2


def test_order_of_coming_does_not_matter():
  port = free_port()
  with ThreadPoolExecutor(3) as pool:
    late = [pool.submit(_meet, port, number, 3) for number in (2, 1)]
    time.sleep(0.3)
    _meet(port, 0, 3)
    assert [one.result(LIMIT) for one in late] == [None, None]


def test_who_is_missing_is_named_to_all_in_time():
  start = time.monotonic()
  answers = _meet_all(free_port(), [(0, 4), (2, 4)], wait_seconds=0.6)
  assert time.monotonic() - start < 4.0
  for refusal in answers:
    assert "process 1, 3 of 4 did not come" in refusal
    assert "(wait_seconds)" in refusal


def test_without_the_first_the_others_give_up_in_time():
  start = time.monotonic()
  (answer,) = _meet_all(port := free_port(), [(1, 2)], wait_seconds=0.5)
  assert time.monotonic() - start < 3.0
  assert f"no answer from process 0 at coordinator {HOST}:{port}" in answer


def test_two_of_one_number_are_refused_at_once_and_all_are_told():
  start = time.monotonic()
  answers = _meet_all(free_port(), [(0, 3), (1, 3), (1, 3)])
  assert time.monotonic() - start < LIMIT / 2
  assert all("two processes have process_id=1" in refusal for refusal in answers)


def test_another_count_is_refused_with_both_counts():
  answers = _meet_all(free_port(), [(0, 2), (1, 3)])
  for refusal in answers:
    assert "process 1 was started with num_processes=3, process 0 with 2" in refusal


def test_port_that_is_taken_is_refused():
  with socket.create_server((HOST, 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(InputError, match=f"cannot listen at .*:{port}.*free"):
      _meet(port, 0, 2)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b"])
def test_host_that_does_not_exist_is_refused(host):
  with pytest.raises(InputError, match="cannot listen at"):
    _meet(free_port(), 0, 2, host=host)
  with pytest.raises(InputError, match="no answer from process 0"):
    _meet(free_port(), 1, 2, 0.2, host)


# ----------------------------------------------------------------------- strangers


GARBAGE = [
  b"",  # Connects and stays silent.
  b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
  b"\x16\x03\x01\x00\xff\xfe\n",
  b"[" * 4000 + b"\n",
  b"x" * 9000,
  b"{}\n",
  b"null\n",
  _line(number="1", count=2),
  _line(number=1.0, count=2),
  _line(number=True, count=2),
  _line(number=[1], count=2),
  _line(number=None, count=2),
  _line(number=1, count="2"),
  _line(number=-1, count=2),
  _line(number=0, count=2),
  _line(number=2, count=2),
]


def test_strangers_neither_stop_nor_delay_the_meeting():
  start = time.monotonic()
  answers = _meet_all(free_port(), [(0, 2), (1, 2)], strangers=GARBAGE)
  assert answers == [None, None]
  assert time.monotonic() - start < 3.0


def test_who_does_not_know_the_word_is_a_stranger():
  """Whatever number and count it says, which would end the meeting otherwise."""
  impostors = [
    _line(number=1, count=2),
    _line(number=1, count=2, word=""),
    _line(number=1, count=2, word="another"),
    _line(number=1, count=3, word=None),
  ]
  peers = [(0, 2), (1, 2)]
  answers = _meet_all(free_port(), peers, strangers=impostors, word="secret")
  assert answers == [None, None]


def test_many_silent_strangers_do_not_prolong_the_wait():
  start = time.monotonic()
  (answer,) = _meet_all(
    free_port(), [(0, 2)], wait_seconds=0.6, strangers=[b"", b"half a li"] * 5
  )
  assert "process 1 of 2 did not come" in answer
  assert time.monotonic() - start < 3.0


def test_stranger_that_trickles_does_not_prolong_the_wait():
  port, stop = free_port(), threading.Event()

  def trickle():
    with _connected(port) as peer, contextlib.suppress(OSError):
      while not stop.wait(0.05):
        peer.sendall(b"x")

  with ThreadPoolExecutor(1) as pool:
    try:
      pool.submit(trickle)
      start = time.monotonic()
      (answer,) = _meet_all(port, [(0, 2)], wait_seconds=0.6)
    finally:
      stop.set()
  assert "process 1 of 2 did not come" in answer
  assert time.monotonic() - start < 3.0


@settings(max_examples=10)
@given(st.binary(max_size=60))
@example(b"\n")
@example(b"1\n\n")
def test_any_bytes_are_a_stranger(words):
  answers = _meet_all(free_port(), [(0, 2), (1, 2)], strangers=[words])
  assert answers == [None, None]


def test_somebody_else_at_the_address_is_not_taken_for_the_first():
  """A server of another kind, that answers and hangs up; no busy loop either."""
  visits = []
  with socket.create_server((HOST, 0)) as other:
    other.settimeout(0.1)
    port, stop = other.getsockname()[1], threading.Event()

    def serve():
      while not stop.is_set():
        with contextlib.suppress(OSError):
          peer, _ = other.accept()
          visits.append(1)
          with peer:
            peer.sendall([b"400 Bad Request\r\n", b"{}\n", b""][len(visits) % 3])

    with ThreadPoolExecutor(1) as pool:
      try:
        pool.submit(serve)
        (answer,) = _meet_all(port, [(1, 2)], wait_seconds=0.6)
      finally:
        stop.set()
  assert "no answer from process 0" in answer
  assert 1 <= len(visits) < 20


# ------------------------------------------------------------------ coming and going


def test_process_that_gave_up_may_come_again():
  """Its number is free again as soon as its connection is closed."""
  port = free_port()
  with ThreadPoolExecutor(1) as pool:
    first = pool.submit(_meet, port, 0, 3)
    for _ in range(3):
      with _stranger(port, _line(number=1, count=3)):
        time.sleep(0.1)  # Killed after it has come.
    answers = _meet_all(port, [(1, 3), (2, 3)])
    assert answers == [None, None]
    assert first.result(LIMIT) is None


def test_process_that_came_and_went_is_missing():
  port = free_port()
  with ThreadPoolExecutor(1) as pool:
    first = pool.submit(_meet_all, port, [(0, 3)], 0.6)
    with _stranger(port, _line(number=1, count=3)):
      time.sleep(0.1)
    (answer,) = first.result(LIMIT)
  assert "process 1, 2 of 3 did not come" in answer


def test_message_in_pieces_is_heard_whole():
  port = free_port()
  with ThreadPoolExecutor(1) as pool:
    first = pool.submit(_meet, port, 0, 2)
    with _connected(port) as peer:
      for byte in _line(number=1, count=2):
        peer.sendall(bytes([byte]))
        time.sleep(0.002)
      peer.settimeout(LIMIT)
      assert json.loads(peer.recv(100)) == "go"
    assert first.result(LIMIT) is None
