"""The measurement of doubt: other images come as digits do, a line has all numbers, and the table is of the lines."""

import numpy as np
import pytest
import torch
from conftest import load_example
from lab.studies import read_lines
from PIL import Image

script = load_example("uncertainty")


@pytest.fixture
def smoke(tmp_path, monkeypatch) -> list[str]:
    """The command line of a small run."""
    monkeypatch.setattr(script, "DIGITS", script.DIGITS | {"train_size": 20, "image_size": 16})
    monkeypatch.setattr(script, "NUM_SAMPLES", 2)
    sizes = ["--steps", "1", "--num_inside", "30", "--num_outside", "10", "--outside", "noise", "inverted"]
    places = ["--results", str(tmp_path / "lines.jsonl"), "--cache_dir", str(tmp_path / "cache")]
    return [*sizes, *places, "--figures", str(tmp_path / "figures"), "--subset_seeds", "1001"]


def test_other_images_are_prepared_as_digits_are(smoke):
    options = script.parse(smoke)
    [config] = script.configs_of(options)
    task = script.task_of(config, options)
    digits = [script.decode_image(value) for value in task.rows.test[task.rows.inputs]]
    own = torch.stack([row["pixel_values"] for row in task.test])
    torch.testing.assert_close(script.as_inputs(digits, task), own, rtol=0, atol=1e-5)
    inverted = script.images_of("inverted", 10, digits, options)
    for image, digit in zip(inverted, digits, strict=False):
        np.testing.assert_array_equal(np.asarray(image), 255 - np.asarray(digit))
    noise = script.images_of("noise", 10, digits, options)
    assert {image.size for image in (*inverted, *noise)} == {(8, 8)}
    assert len({image.tobytes() for image in noise}) == 10
    assert isinstance(noise[0], Image.Image)


def test_a_line_and_its_table(smoke, tmp_path, capsys, monkeypatch):
    script.main(smoke)
    [line] = read_lines(tmp_path / "lines.jsonl")
    assert (line["config"]["what"], line["config"]["subset_seed"], line["machine"]["threads"]) == (
        "uncertainty",
        1001,
        1,
    )
    assert not {"method", "row"} & line["config"].keys()  # other tables are made of these
    assert line["aurc"].keys() == set(script.SCORES)
    assert line["auroc"].keys() == {"noise", "inverted"}
    assert all(0 <= value <= 1 for scores in line["auroc"].values() for value in scores.values())
    for kind, scores in line["mean_scores"].items():
        assert 0 <= scores["doubt"] <= scores["average_entropy"] <= np.log(10), kind
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        f"uncertainty_{what}_1001.{suffix}" for what in ("risk", "outside") for suffix in ("png", "json")
    }
    printed = capsys.readouterr().out
    assert f"| doubt (mutual information) | {100 * line['aurc']['doubt']:.2f} | " in printed
    assert f"{100 * line['wrong']['average']:.2f} average" in printed

    monkeypatch.setattr(script, "carry_out", pytest.fail)  # nothing is left to do
    script.main(smoke)
    script.main([*smoke, "--table"])
