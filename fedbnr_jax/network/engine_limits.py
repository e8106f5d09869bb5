"""Limits that a site sets its own engine, whatever the server asks of it.

NVFLARE lets the server say, request by request, whether a site must look up a right. So
the engine of a site keeps the few requests that a run needs, whoever asks, and starts a
job only if its files are those of `engine_files.job`.
"""

import json
import logging
import pathlib
from typing import Any

from nvflare.apis.fl_constant import FLContextKey, JobConstants
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.job_launcher.client_process_launcher import (
  ClientProcessJobLauncher,
)

from fedbnr_jax.network import engine_files

_LOG = logging.getLogger(__name__)
_STARTED = "fedbnr_jax.network.started"
# By the names of their classes: of the engine of a site, and of the process of a job.
_REQUESTS = (
  *("CheckResourceProcessor", "CancelResourceProcessor", "DeployProcessor"),
  *("StartJobProcessor", "AbortAppProcessor", "AbortTaskProcessor"),
  *("NotifyJobStatusProcessor", "ClientStatusProcessor"),
)
# What NVFLARE adds to the files of a job, and does not run.
_SIGNATURES = (".__nvfl_sig.json", ".__nvfl_submitter.crt")
_COMMANDS = ("CheckStatusCommand", "AbortCommand", "AbortTaskCommand", "ByeCommand")


def restrict() -> None:
  """Leaves the requests that a run needs; before the engine starts.

  Raises:
    RuntimeError: If this is another engine than the one that is known.
  """
  from nvflare.private.fed.client.admin_commands import AdminCommands
  from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

  _keep(ClientRequestProcessors.request_processors, _REQUESTS)
  _keep(AdminCommands.commands, _COMMANDS)


def require_known(folder: pathlib.Path) -> None:
  """Raises RuntimeError unless an app that came with a job is the one that is known.

  Args:
    folder: Of the app: its files as the server has sent them.
  """
  app = engine_files.SITE_APP
  wanted = {
    name.removeprefix(f"{app}/"): json.loads(text)
    for name, text in engine_files.job("", ()).items()
    if name.startswith(f"{app}/")
  }
  found = {
    path.relative_to(folder).as_posix(): path
    for path in folder.rglob("*")
    if not path.is_dir() and path.name not in _SIGNATURES
  }
  if set(found) != set(wanted):
    raise RuntimeError(f"a job came with {sorted(found)}: it is not started")
  for name, path in found.items():
    if path.is_symlink() or json.loads(path.read_text()) != wanted[name]:
      raise RuntimeError(f"a job came with another {name}: it is not started")


class SiteLauncher(ClientProcessJobLauncher):
  """Starts the process of a job, if the job is known, with the same limits."""

  def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> Any:
    """Is called by the engine."""
    workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    job = job_meta[JobConstants.JOB_ID]
    try:
      require_known(pathlib.Path(workspace.get_app_dir(job)))
    except Exception:
      _LOG.exception("job %s", job)  # The engine itself would not say it here.
      raise
    return super().launch_job(job_meta, fl_ctx)

  def get_command(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> str:
    """Is called by the engine."""
    command = str(super().get_command(job_meta, fl_ctx))
    if " -m " not in command:
      raise RuntimeError("the engine starts jobs in another way than is known")
    return command.replace(" -m ", f" -m {_STARTED} ", 1)


def _keep(parts: list[Any], names: tuple[str, ...]) -> None:
  kept = [part for part in parts if type(part).__name__ in names]
  if len(kept) != len(names):
    raise RuntimeError("this engine has other requests than those that are known")
  parts[:] = kept
