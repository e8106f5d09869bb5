"""The one exception that means: the input is wrong, and here is what to do."""


class InputError(ValueError):
  """A mistake in a file, a config or a call, explained in one line.

  The launch scripts print the message and exit with status 2, without a
  traceback. Everything else that goes wrong is a bug and keeps its traceback.
  """
