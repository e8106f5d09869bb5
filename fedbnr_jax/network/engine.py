"""The engine, NVFLARE: what runs inside of it, and who gives it jobs.

A job of the engine names the two classes here, which are installed at server and sites,
and brings no code. What they run is said by a file that each side writes for itself.
"""

import concurrent.futures
import contextlib
import io
import logging
import pathlib
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.collab import collab
from nvflare.collab.api.exceptions import RunAborted
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session
from nvflare.fuel.hci.client.api_status import APIStatus

from fedbnr_jax.network import engine_files, kits, side
from fedbnr_jax.network.kits import Kit
from fedbnr_jax.network.transport import Answer, Failure

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5  # Between two looks at who is connected, while waiting.
_NEARLY = 0.9  # The engine's clock is not this one.
_SESSION_SECONDS = 5.0
_RETRY_SECONDS = 60.0


class SiteSide:
  """A site, as the engine calls it: bytes in, bytes out, and never an exception."""

  def __init__(self) -> None:
    self._answer: Answer | None = None
    # Answers come one at a time: one that is late is not mixed with the next.
    self._alone = threading.Lock()

  @collab.init
  def prepare(self) -> None:
    """Makes the site's own answering function, of the file that it has written."""
    try:
      folder = pathlib.Path(collab.workspace.get_root_dir())
      self._answer = side.site_program(folder)
      side.note_state(folder, side.IN_A_RUN)
    except BaseException:  # The engine would tell the server what was wrong with a row.
      _LOG.exception("this site cannot answer")

  @collab.publish
  def answer(self, message: bytes) -> bytes:
    """Answers the server; any other caller, such as another site, gets nothing."""
    try:
      if collab.caller != "server" or not isinstance(message, bytes):
        _LOG.warning("a message of %s was not answered", collab.caller)
        return b""
      if self._answer is None:
        return b""
      with self._alone:
        return bytes(self._answer(message))
    except BaseException:
      _LOG.exception("a message could not be answered")
      return b""


class SiteWatch(FLComponent):
  """Notes what a site's engine does, for the program that has started it to tell."""

  def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
    """Is called by the engine."""
    workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    if event_type == EventType.AFTER_CLIENT_REGISTER and workspace is not None:
      side.note_state(pathlib.Path(workspace.get_root_dir()), side.CONNECTED)


class ServerSide:
  """The coordinator, as the engine calls it."""

  @collab.main
  def run(self) -> None:
    """Runs the coordinator's program, and writes how it ended."""
    folder = pathlib.Path(collab.workspace.get_root_dir())
    proxies = {proxy.name: proxy for proxy in collab.clients}
    sites = kits.opened(folder).plan.sites
    transport = EngineTransport(sites, proxies, folder)
    side.run_server_program(folder, transport, transport.lost)


class EngineTransport:
  """Carries messages over the engine's open connections, encrypted end to end."""

  def __init__(
    self, sites: Sequence[str], proxies: Mapping[str, Any], folder: pathlib.Path
  ) -> None:
    """Reaches the sites of a job.

    Args:
      sites: Names of all sites, also of those that are not there.
      proxies: The engine's, by name of the site.
      folder: Of the server's kit, where `serve` keeps note of who is connected.

    Attributes:
      lost: Sites that a message could not be carried to, or whose answer did not come.
    """
    self.sites = tuple(sites)
    self._proxies = dict(proxies)
    self._folder = folder
    self._began = side.connected(folder)
    self.lost: set[str] = set()
    self._gone: set[str] = set()
    # A call that has timed out here may still hold its thread.
    self._threads = concurrent.futures.ThreadPoolExecutor(
      4 * max(1, len(self._proxies)), "ask"
    )

  def ask(
    self, messages: Mapping[str, bytes], seconds: float
  ) -> dict[str, bytes | Failure]:
    """Sends all messages at once; a site that is no longer connected fails at once."""
    calls = {
      name: self._threads.submit(self._call, name, message, seconds)
      for name, message in messages.items()
      if name in self._proxies and name not in self._gone
    }
    self._wait(calls)
    answers = {name: self._result(name, calls, seconds) for name in messages}
    self.lost |= {name for name, it in answers.items() if isinstance(it, Failure)}
    return answers

  def _call(self, name: str, message: bytes, seconds: float) -> bytes:
    end = time.monotonic() + _NEARLY * seconds
    try:
      proxy = self._proxies[name](timeout=seconds, secure=True)
      return bytes(proxy.answer(message=message))
    except RunAborted as error:
      raise ConnectionError("is cut off: the engine has ended the job") from error
    except Exception as error:
      _LOG.warning("site %s: %s", name, error)
      if time.monotonic() < end:
        raise ConnectionError("cannot be reached any more") from error
      raise ConnectionError(f"did not answer within {seconds:g} seconds") from error

  def _wait(self, calls: Mapping[str, concurrent.futures.Future[bytes]]) -> None:
    """Waits for answers of all who are still connected."""
    waiting = set(calls.values())
    while waiting:
      _, waiting = concurrent.futures.wait(waiting, timeout=_LOOK_SECONDS)
      if waiting:
        now = side.connected(self._folder)
        # Who comes back has another mark, and takes part in the next job only.
        self._gone |= {n for n in self._proxies if now.get(n) != self._began.get(n)}
        waiting -= {call for name, call in calls.items() if name in self._gone}

  def _result(
    self,
    name: str,
    calls: Mapping[str, concurrent.futures.Future[bytes]],
    seconds: float,
  ) -> bytes | Failure:
    if name not in self._proxies:
      return Failure("has not joined")
    if name not in calls or not calls[name].done():
      return Failure("is no longer connected")
    try:
      return calls[name].result() or Failure("could not answer; its own log says why")
    except ConnectionError as error:
      return Failure(str(error))


# ------------------------------------------------------------ who gives the engine jobs


class Control:
  """A session with a server's engine: who is connected, and jobs.

  A machine that has much to do answers late; so what fails is tried again for a while,
  in a session of its own, and then a ConnectionError is raised.
  """

  def __init__(self, kit: Kit, session: Session) -> None:
    self._kit, self._session = kit, session

  def connected(self) -> dict[str, str]:
    """Returns the sites that are connected; another mark means another connection."""
    result = self._do(_status_of_server)
    found: dict[str, str] = {}
    for part in result.get("data", ()):
      rows = part.get("rows") or [] if part.get("type") == "table" else []
      if rows and "TOKEN" in rows[0]:
        name, mark = rows[0].index("CLIENT"), rows[0].index("TOKEN")
        found |= {row[name]: side.mark(row[mark]) for row in rows[1:]}
    return found

  def submit(self, sites: Sequence[str], fewest: int) -> str:
    """Gives the engine a job for sites, or at least so many; returns its number."""
    once = secrets.token_hex(16)  # However often it is tried, it is one job.
    with tempfile.TemporaryDirectory() as folder:
      place = pathlib.Path(folder) / "federation"
      for path, text in engine_files.job("federation", tuple(sites), fewest).items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
      return str(self._do(lambda session: session.submit_job(str(place), once)))

  def status(self, job: str) -> str:
    """Returns what the engine says of a job, such as RUNNING or FINISHED:COMPLETED."""
    return str(self._do(lambda session: session.get_job_status(job)))

  def abort(self, job: str) -> None:
    """Ends a job."""
    with contextlib.suppress(Exception):
      self._session.abort_job(job)

  def close(self) -> None:
    """Ends the session; else this process would not end."""
    with contextlib.suppress(Exception):
      self._session.close()

  def _do(self, ask: Callable[[Session], Any]) -> Any:
    end = time.monotonic() + _RETRY_SECONDS
    while True:
      try:
        return ask(self._session)
      except Exception as error:
        if time.monotonic() > end:
          raise ConnectionError(f"{type(error).__name__}: {error}") from error
        self.close()
        self._session = _session(self._kit, end)


def _status_of_server(session: Session) -> dict[str, Any]:
  result = dict(session.do_command("check_status server"))
  if result.get("status") != APIStatus.SUCCESS:
    raise ConnectionError(f"{result.get('status')}: {result.get('details', '')}")
  return result


@contextlib.contextmanager
def control(kit: Kit, seconds: float) -> Iterator[Control]:
  """Opens a session with the engine of a server's kit, as soon as it is up.

  Raises:
    ConnectionError: If it is not up in time.
  """
  # It speaks of every try; what counts is raised, and the engine has a log of its own.
  quiet = logging.getLogger("nvflare")
  quiet.propagate = False
  quiet.addHandler(logging.NullHandler())
  opened = Control(kit, _session(kit, time.monotonic() + seconds))
  try:
    yield opened
  finally:
    opened.close()


def _session(kit: Kit, until: float) -> Session:
  folder = str(kit.folder / "admin")
  while True:
    try:
      with contextlib.redirect_stdout(io.StringIO()):
        return new_secure_session(
          engine_files.COORDINATOR,
          folder,
          timeout=_SESSION_SECONDS,
          auto_login_max_tries=1,
        )
    except Exception as error:
      if time.monotonic() > until:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
      time.sleep(0.3)
