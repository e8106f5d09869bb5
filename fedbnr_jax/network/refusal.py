"""What a site says where it does not answer: one of a few sentences, never a cell.

The text of an error may quote a row. So it goes into the site's own log, and to the
coordinator goes a code, which both sides know the sentence of.
"""

SENTENCES = {
  "unreadable": "cannot read the message: are both of the same version?",
  "not-approved": "has not approved this federation: compare the digests",
  "not-agreed": "is asked for a config that was not agreed on",
  "unknown-training": "does not know this training",
  "unknown-run": "is not in this run",
  "other-rows": "has other rows than when the run began: restore them",
  "other-draws": "draws another kernel from the same seed: are machines alike?",
  "told": "has told its own scores already, of another model",
  "limit": "has answered as many sums as were agreed on",
  "rule": "may not answer this attempt by the rules of masked sums",
  "not-finite": "has a loss, or an answer, that is not finite",
  "failed": "could not answer, for a reason that its own log tells",
}


class RefusalError(Exception):
  """A site does not answer."""

  def __init__(self, code: str, detail: str = "") -> None:
    super().__init__(detail or SENTENCES[code])
    self.code = code


def sentence(code: object) -> str:
  """Returns what follows a site's name in a message to people."""
  return SENTENCES.get(str(code), "refuses without a reason that is known here")
