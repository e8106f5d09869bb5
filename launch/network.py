"""A real federation over the network, for administrators of its server and sites.

python -m launch.network demo
python -m launch.network init --sites=north,south,west --server=HOST:PORT --output=fed
python -m launch.network schema --data=table.csv --target=price --output=schema.json
python -m launch.network request --kit=north
python -m launch.network approve --kit=fed --request=request.pem
python -m launch.network agree --kit=fed --config=configs/csv.py --schema=schema.json \
  --output=federation.json
python -m launch.network serve --kit=fed/server --federation=federation.json \
  --workdir=runs/fed
python -m launch.network join --kit=north --data=north.csv --approve=federation.json \
  --certificate=north.crt

`init`, `approve`, `agree` and `serve` are for the server's administrator, `request` and
`join` for a site's; docs/howto/network_server.md and network_site.md go through them.
`demo` does all of it on this machine. What is stopped goes on with the same command.
"""

import signal
import sys

from absl import flags

from fedbnr_jax.errors import InputError
from fedbnr_jax.names import require_choice
from fedbnr_jax.network import agreement, joining, kits, schema, serving
from fedbnr_jax.network.schema_proposal import propose
from launch import common, network_demo

flags.declare_key_flag(common.CONFIG)
flags.declare_key_flag(common.OUTPUT)
flags.declare_key_flag(common.WORKDIR)
_SITES = flags.DEFINE_list("sites", [], "Names of the sites.")
_SERVER = flags.DEFINE_string("server", None, "HOST:PORT under which sites reach it.")
_NAME = flags.DEFINE_string("name", "federation", "Name of the federation.")
_KEYS_HERE = flags.DEFINE_bool(
  "keys_here", False, "Make the sites' keys here too, for a trial on one machine."
)
_KIT = flags.DEFINE_string("kit", None, "Folder of a kit, or of all that init made.")
_REQUEST = flags.DEFINE_string("request", None, "A site's request for a certificate.")
_CERTIFICATE = flags.DEFINE_string(
  "certificate", None, "What came back for the site's request; at the first time."
)
_DATA = flags.DEFINE_string("data", None, "Table of this site.")
_TARGET = flags.DEFINE_string("target", None, "Column to predict.")
_CATEGORICAL = flags.DEFINE_list(
  "categorical", [], "Columns of labels that look like numbers or dates."
)
_MISSING = flags.DEFINE_enum(
  "missing", "error", ["error", "impute"], "What becomes of cells that are missing."
)
_SCHEMA = flags.DEFINE_string("schema", None, "File that says what all tables have.")
_FEDERATION = flags.DEFINE_string("federation", None, "File that all have approved.")
_APPROVE = flags.DEFINE_string(
  "approve", None, "The federation.json that this site agrees to."
)
_MASKING = flags.DEFINE_bool(
  "masking", None, "Mask sums; by default where there are three sites or more."
)
_MIN_SITES = flags.DEFINE_integer(
  "min_sites", None, "A sum over fewer is not used; all by default.", 1
)
_TELL_SCORES = flags.DEFINE_bool(
  "tell_scores", False, "Let the report have each site's own error, unmasked."
)
_MESSAGE_SECONDS = flags.DEFINE_float(
  "message_seconds", 600.0, "For which a site may think about one message.", 1.0
)
_WAIT = flags.DEFINE_float("wait", 3600.0, "Seconds to wait for sites to come.", 0.0)


def main() -> None:
  command = _COMMAND[0] if _COMMAND else ""
  if not command:
    raise InputError(f"say what to do: {', '.join(COMMANDS)}; --help has the rest.")
  require_choice("the command", command, COMMANDS)
  # As Ctrl-C: processes of the engine are ended too.
  signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
  COMMANDS[command]()


def init() -> None:
  """Certificates, and one kit a site."""
  output = _needed("output", common.OUTPUT.value, "the folder of kits to make")
  server = _needed("server", _SERVER.value, "HOST:PORT under which sites reach it")
  kits.init(
    output, _SITES.value, server, federation=_NAME.value, keys_here=_KEYS_HERE.value
  )
  print(f"{output}/server is the kit of the server, and {output}/authority vouches.")
  for site in _SITES.value:
    print(f"{output}/{site} goes to site {site!r}.")
  if not _KEYS_HERE.value:
    print("Each site makes its own key: `request`, there. Then `approve`, here.")
  else:
    print("All keys were made here: good for a trial, and for nothing else.")


def propose_schema() -> None:
  """What all tables must have, read off one."""
  data = _needed("data", _DATA.value, "a table")
  output = _needed("output", common.OUTPUT.value, "the file to write")
  target = _needed("target", _TARGET.value, "the column to predict")
  proposed = propose(data, target, _CATEGORICAL.value, missing=_MISSING.value)
  schema.write(output, proposed)
  print(f"{output}: look it over, and edit it, before others see it. It names columns,")
  print("labels of categories, and how far numbers spread, to a power of ten.")


def request() -> None:
  """A site's key, and its request for a certificate."""
  path, fingerprint = kits.make_request(_needed("kit", _KIT.value, "the site's kit"))
  print(f"{path} goes to who has made the kit. Your key stays here; by telephone, tell")
  print(f"them its fingerprint: {agreement.fingerprint(fingerprint)}")


def approve() -> None:
  """A certificate for a site that has asked for one."""
  folder = _needed("kit", _KIT.value, "the folder that init has made")
  asked = _needed("request", _REQUEST.value, "the file that the site has sent")
  name, path, fingerprint = kits.approve(folder, asked)
  print(f"{path} goes to site {name!r}, if its people read this fingerprint to you:")
  print(agreement.fingerprint(fingerprint))


def agree() -> None:
  """federation.json, of config, schema and members."""
  folder = _needed("kit", _KIT.value, "the folder that init has made")
  output = _needed("output", common.OUTPUT.value, "the file to write")
  columns = _needed("schema", _SCHEMA.value, "the file of the schema")
  made = agreement.make(
    common.config(),
    schema.read(columns),
    kits.members(folder),
    name=_NAME.value,
    masking=_MASKING.value,
    min_sites=_MIN_SITES.value,
    tell_scores=_TELL_SCORES.value,
  )
  agreement.write(output, made)
  print(f"{output} goes to every site. Tell each other its digest by telephone:")
  print(agreement.fingerprint(made.digest()))
  if made.tell_scores:
    print(
      "In the end each site's own error over its test rows is told to all, unmasked."
    )
  if made.masking and made.min_sites < len(made.members):
    print("A site that misses a round can be told from the sums before and after it;")
    print("without --min_sites the run waits for all instead.")
  if not made.masking and len(made.members) == 2:
    print("Of two sites, each can take its own part from a sum, and read the other's.")
  elif not made.masking:
    print("Sums are not masked: the server sees the part of each site.")


def serve() -> None:
  """Trains over the sites."""
  folder = _needed("kit", _KIT.value, "the server's kit")
  federation = _needed("federation", _FEDERATION.value, "the file that all approved")
  workdir = common.workdir()
  serving.serve(
    folder,
    federation,
    workdir,
    say=_say,
    seconds=_MESSAGE_SECONDS.value,
    wait=_WAIT.value,
  )
  for line in serving.results(workdir):
    print(line)


def join() -> None:
  """Answers runs of one agreement."""
  folder = _needed("kit", _KIT.value, "the site's kit")
  data = _needed("data", _DATA.value, "the site's table")
  approved = _needed("approve", _APPROVE.value, "the federation.json you agree to")
  joining.join(folder, data, approved, say=_say, certificate=_CERTIFICATE.value)


def show() -> None:
  """All of it on this machine."""
  for line in network_demo.run(common.WORKDIR.value or "runs/network", _say):
    print(line)


COMMANDS = {
  "demo": show,
  "init": init,
  "schema": propose_schema,
  "request": request,
  "approve": approve,
  "agree": agree,
  "serve": serve,
  "join": join,
}
_COMMAND: list[str] = []


def _needed(flag: str, value: str | None, what: str) -> str:
  if not value:
    raise InputError(f"--{flag} is missing: name {what}.")
  return value


def _say(line: str) -> None:
  print(line, flush=True)


if __name__ == "__main__":
  # The command is the one argument that is no flag.
  _COMMAND += [word for word in sys.argv[1:2] if not word.startswith("-")]
  del sys.argv[1 : 1 + len(_COMMAND)]
  common.run(main)
