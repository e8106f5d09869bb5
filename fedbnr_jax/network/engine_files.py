"""What the engine reads from a kit: every file follows from the kit's plan alone.

So a kit can be compared with what it must be, and one that was edited is not started.
Stock settings of NVFLARE let jobs bring code, stream error logs to the server and let
its administrator read files of a site; none of these here does.
"""

import dataclasses
import json
from typing import Any

VERSION = "2.9.0"  # Of NVFLARE; another one may read other settings, or none of these.
# The names by which a job may call for code: what is installed, and nothing beside it.
SITE_CLASSES = (
  "nvflare.collab.runtime.executor.CollabExecutor",
  "fedbnr_jax.network.engine.SiteSide",
)
_WATCH = "fedbnr_jax.network.engine.SiteWatch"
_LAUNCHER = "fedbnr_jax.network.engine_limits.SiteLauncher"
SITE_APP = "site"  # What of a job goes to sites.
SERVER_CLASSES = (
  "nvflare.collab.runtime.controller.CollabController",
  "fedbnr_jax.network.engine.ServerSide",
)
SERVER_RESOURCES = "local/resources.json"
SERVER = "fedbnr-server"  # Whom the server's certificate is for, whatever its host.
COORDINATOR = "coordinator"  # Who gives the engine its jobs.
_ROLE = "coordinator"
# Without a sign of life, after which a site counts as gone. A machine that has much to
# do was seen to miss signs for 20 s.
_HEARTBEAT_SECONDS = 45
_LOG_BYTES = 5_000_000


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a kit is for; all of its settings follow from it.

  Attributes:
    name: The site's name, or `SERVER`.
    federation: Name of the federation.
    host: Under which the server is reached.
    port: Of the server.
    sites: Names of all sites; at a site, its own.
  """

  name: str
  federation: str
  host: str
  port: int
  sites: tuple[str, ...]

  @property
  def serves(self) -> bool:
    """Whether it is the server's."""
    return self.name == SERVER


def settings(plan: Plan) -> dict[str, str]:
  """Returns the text of every file that is no key and no certificate, by its path."""
  files = {
    "local/authorization.json": {"format_version": "1.0", "permissions": _rights(plan)},
    "local/log_config.json": _logs(),
  }
  if plan.serves:
    files["startup/fed_server.json"] = _server(plan)
    files["admin/startup/fed_admin.json"] = _admin(plan)
    files["admin/local/resources.json"] = {"format_version": 1, "admin": {}}
  else:
    files["startup/fed_client.json"] = _client(plan)
    files["local/resources.json"] = _site_resources()
  return {path: json.dumps(content, indent=2) + "\n" for path, content in files.items()}


def written_at_start(plan: Plan, folder: str) -> dict[str, str]:
  """Returns the files that depend on where a kit lies, which is told at each start."""
  if not plan.serves:
    return {}
  return {SERVER_RESOURCES: json.dumps(_server_resources(folder), indent=2) + "\n"}


def role() -> str:
  """Returns the role of who gives the engine its jobs."""
  return _ROLE


def start_arguments(plan: Plan, folder: str) -> list[str]:
  """Returns the module of the engine that runs a kit, and its arguments."""
  side, module = (
    ("server", "server_train") if plan.serves else ("client", "client_train")
  )
  values = ["secure_train=true", "org=federation", "config_folder=config"]
  if not plan.serves:
    values += [f"uid={plan.name}", "heart_beat_interval=5"]
  package = f"nvflare.private.fed.app.{side}.{module}"
  return [package, "-m", folder, "-s", f"fed_{side}.json", "--set", *values]


def job(name: str, sites: tuple[str, ...], fewest: int = 1) -> dict[str, str]:
  """Returns the files of a job: it names installed classes, and has no code.

  Args:
    name: Of the job.
    sites: Who takes part.
    fewest: Without as many of them the engine ends the job.
  """
  files: dict[str, Any] = {
    "meta.json": {
      "name": name,
      "min_clients": fewest,
      "resource_spec": {},
      "deploy_map": {"server": ["server"], SITE_APP: list(sites)},
    },
    "server/config/config_fed_server.json": {
      "format_version": 2,
      "workflows": [
        {
          "id": "controller",
          "path": SERVER_CLASSES[0],
          "args": {"server_obj_id": "side", "collab_obj_ids": []},
        }
      ],
      "components": [{"id": "side", "path": SERVER_CLASSES[1], "args": {}}],
    },
    f"{SITE_APP}/config/config_fed_client.json": {
      "format_version": 2,
      "executors": [
        {
          "tasks": ["*"],
          "executor": {
            "path": SITE_CLASSES[0],
            "args": {"client_obj_id": "side", "collab_obj_ids": []},
          },
        }
      ],
      "components": [{"id": "side", "path": SITE_CLASSES[1], "args": {}}],
    },
  }
  return {path: json.dumps(content, indent=2) for path, content in files.items()}


def _rights(plan: Plan) -> dict[str, Any]:
  """Says what the coordinator may do; whoever has no role here may do nothing."""
  own = {"operate": "any"} if plan.serves else {"operate": "none"}
  return {
    _ROLE: {
      "submit_job": "any",
      "manage_job": "any",
      "view": "any",
      "clone_job": "none",
      "download_job": "none",
      "shell_commands": "none",
      "byoc": "none",
      "server-predeployed-flwr": "none",
      **own,
    }
  }


def _client(plan: Plan) -> dict[str, Any]:
  service = {"target": f"{plan.host}:{plan.port}", "scheme": "grpc"}
  return {
    "format_version": 2,
    "servers": [{"name": plan.federation, "service": service, "identity": SERVER}],
    "client": {
      "ssl_private_key": "client.key",
      "ssl_cert": "client.crt",
      "ssl_root_cert": "rootCA.pem",
      "fqsn": plan.name,
      "is_leaf": True,
      "connection_security": "mtls",
    },
  }


def _server(plan: Plan) -> dict[str, Any]:
  return {
    "format_version": 2,
    "servers": [
      {
        "name": plan.federation,
        "service": {"target": f"{plan.host}:{plan.port}", "scheme": "grpc"},
        "admin_server": plan.host,
        "admin_port": plan.port,
        "ssl_private_key": "server.key",
        "ssl_cert": "server.crt",
        "ssl_root_cert": "rootCA.pem",
        "connection_security": "mtls",
      }
    ],
  }


def _admin(plan: Plan) -> dict[str, Any]:
  return {
    "format_version": 1,
    "admin": {
      "project_name": plan.federation,
      "username": COORDINATOR,
      "server_identity": SERVER,
      "scheme": "grpc",
      "host": plan.host,
      "port": plan.port,
      "connection_security": "mtls",
      "uid_source": "user_input",
      "with_file_transfer": True,
      "upload_dir": "transfer",
      "download_dir": "transfer",
      "client_key": "client.key",
      "client_cert": "client.crt",
      "ca_cert": "rootCA.pem",
    },
  }


def _policy(classes: tuple[str, ...]) -> dict[str, Any]:
  return {
    "format_version": 2,
    "class_list_enforcement_mode": "enforce",
    "class_allow_list": list(classes),
    "allow_log_streaming": False,
  }


def _site_resources() -> dict[str, Any]:
  return {
    **_policy(SITE_CLASSES),
    "client": {"retry_timeout": 30, "compression": "Gzip"},
    "components": [
      _component(
        "resource_manager",
        "resource_managers.gpu_resource_manager.GPUResourceManager",
        num_of_gpus=0,
        mem_per_gpu_in_GiB=0,
      ),
      _component(
        "resource_consumer",
        "resource_consumers.gpu_resource_consumer.GPUResourceConsumer",
      ),
      {"id": "process_launcher", "path": _LAUNCHER},
      {"id": "watch", "path": _WATCH},
    ],
  }


def _server_resources(folder: str) -> dict[str, Any]:
  storage = "nvflare.app_common.storages.filesystem_storage.FilesystemStorage"
  return {
    **_policy(SERVER_CLASSES),
    "servers": [
      {
        "admin_storage": "transfer",
        "max_num_clients": 100,
        "heart_beat_timeout": _HEARTBEAT_SECONDS,
        "admin_timeout": 10.0,
      }
    ],
    # Paths are below the kit's folder, which nobody else may read; stock ones are not.
    "snapshot_persistor": {
      "path": "nvflare.app_common.state_persistors.storage_state_persistor."
      "StorageStatePersistor",
      "args": {
        "uri_root": "/",
        "storage": {
          "path": storage,
          "args": {"root_dir": f"{folder}/snapshots", "uri_root": "/"},
        },
      },
    },
    "components": [
      _component(
        "job_scheduler", "job_schedulers.job_scheduler.DefaultJobScheduler", max_jobs=1
      ),
      {
        "id": "job_manager",
        "path": "nvflare.apis.impl.job_def_manager.SimpleJobDefManager",
        "args": {"uri_root": f"{folder}/jobs", "job_store_id": "job_store"},
      },
      {"id": "job_store", "path": storage},
      _component(
        "process_launcher",
        "job_launcher.server_process_launcher.ServerProcessJobLauncher",
      ),
    ],
  }


def _component(name: str, path: str, **arguments: Any) -> dict[str, Any]:
  return {"id": name, "path": f"nvflare.app_common.{path}", "args": arguments}


def _logs() -> dict[str, Any]:
  """One log file a process, in the kit's folder, and nothing on the screen."""
  return {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
      "plain": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}
    },
    "handlers": {
      "logFileHandler": {
        "class": "logging.handlers.RotatingFileHandler",
        "level": "DEBUG",
        "formatter": "plain",
        "filename": "log.txt",
        "mode": "a",
        "maxBytes": _LOG_BYTES,
        "backupCount": 3,
      }
    },
    "loggers": {"root": {"level": "INFO", "handlers": ["logFileHandler"]}},
  }
