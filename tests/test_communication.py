"""Error against communication: what is read from runs, and when a goal is reached."""

import pytest
from absl.testing import flagsaver

from fedbnr_jax.run import summary
from fedbnr_jax.run.records import RunFolder
from fedbnr_jax.studies import communication
from launch import communication as launch_communication
from tests.drawings import png_size
from tests.runs import assert_refused, tiny


def _run(path, errors, *, finished=True, dataset="made", **fields):
  """A folder with a round for each (validation, test) error, ten floats each way."""
  folder, config = RunFolder(path), tiny(**fields)
  folder.claim(config)
  sent = 0 if config.method == "central" else 10
  others = {"floats_up": sent, "floats_down": sent, "seconds": 1.0}
  for number, (validation, test) in enumerate(errors, start=1):
    scores = {"round": number, "val_rmse": validation, "test_rmse": test}
    folder.append_metrics(dict.fromkeys(summary.COLUMNS, 1.0) | scores | others)
  if finished:
    known = {"dataset": dataset, "num_clients": 2, "rmse_unit": "target"}
    known |= {"method": config.method, "seed": config.seed}
    folder.write_summary(known | summary.scores(folder.metrics()))
  return path


def test_goal_is_reached_at_the_round_that_validation_would_have_chosen(
  tmp_path, capsys
):
  # Round 2 is better on test rows, but validation prefers round 1 until round 3.
  runs = [
    _run(tmp_path / "a", [(2.0, 5.0), (3.0, 1.0), (1.0, 2.0)]),
    _run(tmp_path / "b", [(2.0, 5.0)], method="fedbnr-exact", hidden_size=4),
    _run(
      tmp_path / "c",
      [(2.0, 4.0)],
      method="fedbnr-exact",
      exact__optimizer="lbfgs",
      exact__warm_start_rounds=2,
    ),
  ]
  output = tmp_path / "figure.png"
  if not launch_communication.flags.FLAGS.is_parsed():
    launch_communication.flags.FLAGS.mark_as_parsed()
  names = [str(run) for run in runs]
  with flagsaver.flagsaver(runs=names, output=str(output), goal=2.5):
    launch_communication.main()
  width, height = png_size(output)
  assert width > height > 500
  _, _, first, second, third, last = capsys.readouterr().out.splitlines()
  assert first.strip("| ").split(" | ") == ["fedbnr", "3", "0.0", "2.000", "3.0", "0.0"]
  assert second.startswith("| fedbnr-exact, width 4 | 1 |")
  assert second.endswith("| – | – |")
  assert third.startswith("| fedbnr-exact, lbfgs, 2 rounds of fedbnr first |")
  assert last == f"drawn to {output}"


def test_progress_sums_floats_and_keeps_the_best_round_of_validation(tmp_path):
  run = _run(tmp_path / "a", [(2.0, 5.0), (3.0, 1.0), (1.0, 2.0)])
  frame = communication.progress(RunFolder(run).metrics_frame())
  assert frame["round"].tolist() == [1, 2, 3]
  assert frame.floats.tolist() == [20, 40, 60]
  assert frame.test_rmse.tolist() == [5.0, 5.0, 2.0]


def test_runs_of_one_method_stand_together_under_the_given_goal(tmp_path):
  runs = [_run(tmp_path / name, [(1.0, 1.0)]) for name in "ab"]
  compared = communication.read(runs)
  assert {name: len(frames) for name, frames in compared.runs.items()} == {"fedbnr": 2}
  assert (compared.dataset, compared.num_clients, compared.unit) == (
    *("made", 2, "target"),
  )
  assert compared.goal is None
  assert "rounds to goal" not in communication.table(compared)


def test_goal_is_the_papers_where_it_has_one():
  assert communication.papers_goal("sml", 100) == 0.44
  assert communication.papers_goal("mine", 100) is None


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"finished": False}, "not finished"),
    ({"method": "central"}, "sends nothing"),
    ({"dataset": "other"}, "several data sets"),
  ],
)
def test_runs_that_cannot_be_compared_are_refused(tmp_path, changes, words):
  runs = [
    _run(tmp_path / "a", [(1.0, 1.0)]),
    _run(tmp_path / "b", [(1.0, 1.0)], **changes),
  ]
  assert_refused(lambda: communication.read(runs), words)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
  (tmp_path / "file").write_text("")
  run, output = _run(tmp_path / "a", [(1.0, 1.0)]), tmp_path / "file" / "figure.png"
  if not launch_communication.flags.FLAGS.is_parsed():
    launch_communication.flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(runs=[str(run)], output=str(output)):
    assert_refused(launch_communication.main, "--output", str(tmp_path / "file"))
