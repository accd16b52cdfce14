import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_model
from PIL import Image
from transformers import (
    AutoModelForImageClassification,
    BertTokenizerFast,
    ResNetConfig,
    ResNetForImageClassification,
    ViTImageProcessor,
)

import hf_deelbo
from hf_deelbo import GaussianPosterior, LowRankPrior
from hf_deelbo.cli import main
from hf_deelbo.sharing.ptyl import load_architecture
from hf_deelbo.temperature import Temperatures

REPO = "alice/posterior"


@pytest.fixture
def posterior() -> GaussianPosterior:
    torch.manual_seed(0)
    names = {0: "cat", 1: "dog", 2: "bird"}
    sizes = {"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}
    labels = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
    model = ResNetForImageClassification(ResNetConfig(**sizes, **labels))
    head = [name for name, _ in model.named_parameters() if name.startswith("classifier")]
    posterior = GaussianPosterior(model, head, init_sigma=0.1, num_examples=30)
    posterior.recompute_batch_norm([{"pixel_values": torch.randn(8, 3, 16, 16)}], num_samples=4)
    return posterior


@pytest.fixture
def folder(posterior, tmp_path) -> str:
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    posterior.save_pretrained(tmp_path / "posterior", processor)
    return str(tmp_path / "posterior")


@pytest.fixture
def image(tmp_path) -> str:
    Image.effect_noise((20, 30), 90).save(tmp_path / "noise.png")
    return str(tmp_path / "noise.png")


def test_info(folder, posterior, capsys):
    assert main(["info", folder]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "image-classification",
        f"{posterior.num_parameters:,}",
        f"{float(posterior.sigma):.4g}",
        "l2-sp",
    ):
        assert expected in printed
    assert "J" not in [line.split("  ")[0] for line in printed.splitlines()]  # it was not measured


def save_with_groups(posterior, folder, names: list[str]) -> None:
    """As of a posterior with these groups, in the JSON alone; the last is the head."""
    posterior.save_pretrained(folder)
    content = json.loads((folder / "posterior_config.json").read_text())
    rows = [
        {
            "name": name,
            "in_head": index == len(names) - 1,
            "num_parameters": 10_000 - 10 * index,
            "sigma": 0.001 * (index + 1),
            "prior_variance": 0.0004,
        }
        for index, name in enumerate(names)
    ]
    content |= {"grouping": "layer", "sigma_update": "closed-form", "groups": rows}
    (folder / "posterior_config.json").write_text(json.dumps(content))


def table_of(printed: str) -> list[str]:
    """What stands below the summary."""
    return printed.partition("\n\n")[2].splitlines()


def test_info_tells_of_several_sigmas(posterior, tmp_path, capsys):
    save_with_groups(posterior, tmp_path, ["stem", "stages.0", "classifier"])
    assert main(["info", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^grouping +layer, 3 sigmas$", printed, flags=re.MULTILINE)
    assert re.search(r"^sigma learned +in closed form, as lambda and tau are$", printed, flags=re.MULTILINE)
    assert table_of(printed) == [
        "group              weights  sigma  sqrt(lambda or tau)",
        "stem                10,000  0.001                 0.02",
        "stages.0             9,990  0.002                 0.02",
        "classifier (head)    9,980  0.003                 0.02",
    ]


def test_info_draws_what_the_layers_learned(posterior, tmp_path, capsys):
    save_with_groups(posterior, tmp_path / "saved", ["stem", "stages\x1b[2J.0", "classifier"])
    assert main(["info", str(tmp_path / "saved"), "--figure", str(tmp_path / "groups.png")]) == 0
    assert "groups.png" in capsys.readouterr().out
    assert Image.open(tmp_path / "groups.png").size[0] > 500
    sigmas, widths = json.loads((tmp_path / "groups.json").read_text())["axes"][0]["lines"][:2]
    assert sigmas["x"] == pytest.approx([0.001, 0.002, 0.003])
    assert widths["x"] == pytest.approx([0.02] * 3)


def test_info_of_one_sigma_has_nothing_to_draw(folder, tmp_path, capsys):
    assert main(["info", folder, "--figure", str(tmp_path / "groups.png")]) == 1
    assert "figure: there is nothing to draw" in capsys.readouterr().err
    assert not list(tmp_path.glob("groups*"))


def test_info_of_one_sigma_has_no_table(folder, capsys):
    assert main(["info", folder]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^grouping +all, 1 sigma$", printed, flags=re.MULTILINE)
    assert table_of(printed) == []


@pytest.mark.parametrize("number", [30, 31, 150])
def test_info_of_many_groups_tells_of_the_largest(posterior, tmp_path, capsys, number):
    names = [f"layer.{index}" for index in range(number)]
    save_with_groups(posterior, tmp_path, names)
    path = tmp_path / "posterior_config.json"
    content = json.loads(path.read_text())
    content["groups"][-1]["num_parameters"] = 20_000  # stays in its place, at the end
    path.write_text(json.dumps(content))
    assert main(["info", str(tmp_path)]) == 0
    _, *rows = table_of(capsys.readouterr().out)
    if number > 30:
        assert rows.pop() == f"and {number - 30} more"
        assert [row.split()[0] for row in rows] == [*names[:29], names[-1]]
    assert len(rows) == 30
    assert "20,000" in rows[-1]


def test_info_prints_no_control_characters_of_strangers(posterior, tmp_path, capsys):
    save_with_groups(posterior, tmp_path, ["a\x1b[2J\nlambda  9", "b" * 1000, "c\u202e"])
    path = tmp_path / "posterior_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model": "x\x1b]0;y\x07\n"}))
    assert main(["info", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in printed)
    assert len(table_of(printed)) == 4
    assert max(map(len, printed.splitlines())) < 300


def test_predict_averages_and_shows_the_spread(folder, posterior, image, capsys):
    assert main(["predict", folder, image]) == 0
    _, name, *rows, last = capsys.readouterr().out.splitlines()
    assert (name, last) == (image, "(averaged over 4 weight samples)")
    pixels = ViTImageProcessor(size={"height": 16, "width": 16})(Image.open(image).convert("RGB"), return_tensors="pt")
    samples = torch.stack([posterior.sample_model(seed)(**pixels).logits.softmax(-1)[0].detach() for seed in range(4)])
    order = samples.mean(0).argsort(descending=True).tolist()
    for row, index in zip(rows, order, strict=True):
        probability, spread, label = row.split()
        assert float(probability) == pytest.approx(samples.mean(0)[index].item(), abs=1e-4)
        assert float(spread) == pytest.approx(samples.std(0)[index].item(), abs=1e-4)
        assert label == posterior.model.config.id2label[index]


def test_predict_at_the_mean(folder, posterior, image, capsys):
    assert main(["predict", folder, image, image, "--num_samples", "0", "--top_k", "1"]) == 0
    pixels = ViTImageProcessor(size={"height": 16, "width": 16})(Image.open(image).convert("RGB"), return_tensors="pt")
    best = posterior.model.eval()(**pixels).logits.softmax(-1)[0].max(0)
    answer = [f"{best.values:.4f}", posterior.model.config.id2label[best.indices.item()]]
    header, *rows, last = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert "spread" not in header
    assert rows == [[image], answer, [image], answer]
    assert " ".join(last) == "(at the posterior mean)"


def test_a_calibrated_posterior_is_told_of_and_predicts_as_such(posterior, tmp_path, image, capsys):
    posterior.temperatures = Temperatures(mean=2.0, average=4.0)
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    posterior.save_pretrained(tmp_path, processor)
    assert main(["info", str(tmp_path)]) == 0
    assert re.search(r"^temperature +2 at the mean, 4 of averages$", capsys.readouterr().out, flags=re.MULTILINE)
    pixels = processor(Image.open(image).convert("RGB"), return_tensors="pt")
    for num_samples in ("0", "4"):
        assert main(["predict", str(tmp_path), image, "--num_samples", num_samples, "--top_k", "1"]) == 0
        probability = capsys.readouterr().out.splitlines()[2].split()[0]
        expected = posterior.predict_proba(pixels, int(num_samples)).max().item()
        assert float(probability) == pytest.approx(expected, abs=1e-4)


def test_predict_texts(tmp_path, capsys):
    folder, posterior, tokenizer = save_texts(tmp_path)
    assert main(["predict", folder, "good good bad"]) == 0
    printed = capsys.readouterr().out
    expected = posterior.predict_proba(tokenizer("good good bad", return_tensors="pt"), num_samples=10)
    assert f"{expected.max().item():.4f}" in printed


def save_texts(tmp_path) -> tuple[str, GaussianPosterior, BertTokenizerFast]:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]))
    tokenizer = BertTokenizerFast(str(tmp_path / "vocab.txt"), model_max_length=16)
    posterior = GaussianPosterior(make_model("bert"), ["classifier.weight", "classifier.bias"], init_sigma=0.2)
    posterior.save_pretrained(tmp_path / "posterior", tokenizer)
    return str(tmp_path / "posterior"), posterior, tokenizer


def test_predict_a_csv_of_texts(tmp_path, capsys):
    folder, posterior, tokenizer = save_texts(tmp_path)
    texts = ["good", "bad bad", "good\nbad", "bad", "good good good"]
    rows = "".join(f'{index},"{text}"\n' for index, text in enumerate(texts))
    (tmp_path / "rows.csv").write_text(f"id,review\n{rows}")
    command = ["predict", folder, str(tmp_path / "rows.csv"), "--column", "review", "--num_samples", "3"]
    assert main([*command, "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["input"] for answer in answers] == texts
    for text, answer in zip(texts, answers, strict=True):
        found = posterior.uncertainty(tokenizer(text, return_tensors="pt"), num_samples=3)
        shares = {row["label"]: row["probability"] for row in answer["predictions"]}
        names = posterior.model.config.id2label
        expected = {names[index]: share for index, share in enumerate(found.probabilities[0].tolist())}
        assert shares == pytest.approx(expected, abs=1e-6)
        for name in ("total", "data", "doubt", "agreement"):
            assert answer["uncertainty"][name] == pytest.approx(getattr(found, name).item(), abs=1e-6)
    assert main(command) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + len(texts) * (1 + len(names))
    assert "good bad" in printed  # a line break of a text is none of the output
    assert main(command[:3]) == 1
    assert "no column 'text'; its columns are 'id', 'review'" in capsys.readouterr().err


def test_predict_a_folder_of_images_as_each_by_itself(folder, posterior, tmp_path, capsys):
    paths = []
    for index in range(3):
        path = tmp_path / "images" / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        Image.effect_noise((20 + index, 30), 90).save(path)
        paths.append(str(path))
    assert main(["predict", folder, str(tmp_path / "images"), "--json", "--top_k", "2"]) == 0
    together = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["input"] for answer in together] == paths
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    for answer in together:
        pixels = processor(Image.open(answer["input"]).convert("RGB"), return_tensors="pt")
        found = posterior.uncertainty(pixels, num_samples=4)
        best = found.probabilities[0].topk(2)
        assert [row["probability"] for row in answer["predictions"]] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert [row["label"] for row in answer["predictions"]] == [
            posterior.model.config.id2label[index] for index in best.indices.tolist()
        ]
        spread = posterior.sample_proba(pixels, 4)[:, 0].std(0)[best.indices]
        assert [row["spread"] for row in answer["predictions"]] == pytest.approx(spread.tolist(), abs=1e-5)
        assert answer["uncertainty"]["doubt"] == pytest.approx(found.doubt.item(), abs=1e-5)
        assert answer["num_samples"] == 4
    (tmp_path / "images" / "2.png").write_bytes(b"no image")
    assert main(["predict", folder, str(tmp_path / "images"), "--json"]) == 1
    printed = capsys.readouterr()
    assert "2.png' cannot be read as an image" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("answers_on_terminal", [False, True])
def test_a_bar_shows_the_progress_unless_the_answers_do(folder, image, monkeypatch, capsys, answers_on_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: answers_on_terminal)
    assert main(["predict", folder, image, image]) == 0
    printed = capsys.readouterr()
    assert "Checking" in printed.err
    assert ("Predicting" in printed.err) == (not answers_on_terminal)
    assert "%|" not in printed.out


@pytest.mark.parametrize(("num_samples", "has_spread"), [(0, False), (1, False), (2, True)])
def test_json_without_doubt(folder, image, capsys, num_samples, has_spread):
    assert main(["predict", folder, image, "--json", "--num_samples", str(num_samples)]) == 0
    [answer] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert answer["num_samples"] == num_samples
    assert (answer["uncertainty"] is not None) == has_spread
    assert all((row["spread"] is not None) == has_spread for row in answer["predictions"])
    assert sum(row["probability"] for row in answer["predictions"]) == pytest.approx(1, abs=1e-5)


def test_info_as_json(folder, posterior, capsys):
    assert main(["info", folder, "--json"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["what"] == "posterior"
    saved = json.loads(Path(folder, "posterior_config.json").read_text())
    assert {name: found[name] for name in saved if name in found} == saved
    assert found["sigma"] == pytest.approx(float(posterior.sigma))


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"hf-deelbo {hf_deelbo.__version__}\n"


@pytest.mark.parametrize("command", [[], ["unknown"], ["info"], ["info", "x", "--json", "--figure", "y.png"]])
def test_a_wrong_command_line_is_2(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2


def test_an_interrupt_is_130_and_tells_no_traceback(folder, image, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(GaussianPosterior, "sample_proba", interrupt)
    assert main(["predict", folder, image]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_went_away_is_141_and_tells_nothing(folder, monkeypatch, capfd):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["info", folder]) == 141
        pipe.flush()  # as Python does when it ends
    assert capfd.readouterr().err == ""


def test_push_then_info_from_the_hub(folder, loopback_hub, monkeypatch, capsys):
    token = loopback_hub.add_user("alice")
    assert main(["push", folder, REPO, "--private", "--token", token]) == 0
    assert REPO in capsys.readouterr().out
    assert loopback_hub.commits(REPO)[0].message == "Upload posterior"
    assert main(["info", REPO]) == 1
    assert "is private" in capsys.readouterr().err
    assert main(["info", REPO, "--token", token]) == 0
    assert loopback_hub.bytes_sent < os.path.getsize(os.path.join(folder, "model.safetensors"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "no/such/place"], "neither a folder nor an id"),
        (["predict", "FOLDER", "no-such.png"], "There is no image 'no-such.png'"),
        (["predict", "FOLDER", "FOLDER/config.json"], "cannot be read as an image"),
        (["predict", "FOLDER", "IMAGE", "--num_samples", "7"], "sample 4 has no statistics"),
        (["push", "no-such-folder", REPO], "There is no folder"),
    ],
)
def test_errors_are_one_line(arguments, message, folder, image, capsys):
    arguments = [a.replace("FOLDER", folder).replace("IMAGE", image) for a in arguments]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert "probability  class" not in printed.out


def test_a_damaged_posterior_is_not_pushed(folder, loopback_hub, capsys):
    token = loopback_hub.add_user("alice")
    with open(os.path.join(folder, "model.safetensors"), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    assert main(["push", folder, REPO, "--token", token]) == 1
    assert "hash" in capsys.readouterr().err
    assert loopback_hub.requests == []


def test_import_ptyl_then_info_and_push(tmp_path, loopback_hub, capsys):
    source = load_architecture("resnet10t")
    weights = {
        name.removeprefix("timm_model."): tensor
        for name, tensor in source.state_dict().items()
        if "timm_model.fc." not in name
    }
    own = dict(source.timm_model.named_parameters())
    size = sum(own[name].numel() for name in weights if name in own)
    (tmp_path / "released").mkdir()
    generator = torch.Generator().manual_seed(0)
    mean = torch.cat([own[name].detach().flatten() for name in own if name in weights])
    deviations = torch.randn(6, size, generator=generator)
    for part, value in {
        "model": weights,
        "mean": mean,
        "variance": torch.rand(size, generator=generator),
        "covmat": deviations,
    }.items():
        torch.save(value, tmp_path / "released" / f"r_{part}.pt")
    output = str(tmp_path / "prior")
    command = ["import-ptyl", str(tmp_path / "released"), "--model", "resnet10t", "--output", output]
    assert main([*command, "--num_deviations", "3"]) == 0
    assert "rank 3" in capsys.readouterr().out
    prior = LowRankPrior.from_pretrained(output)
    first = prior.deviations["timm_model.conv1.0.weight"]  # of the model's order, so of the flat numbers
    assert torch.equal(first.reshape(3, -1), deviations[:3, : first[0].numel()])
    loaded = AutoModelForImageClassification.from_pretrained(output)
    assert torch.equal(loaded.timm_model.conv1[0].weight, source.timm_model.conv1[0].weight)

    assert main(command) == 1
    assert "is there already" in capsys.readouterr().err
    assert main(["info", output]) == 0
    assert f"{size:,}" in capsys.readouterr().out
    assert main(["push", output, "alice/prior", "--token", loopback_hub.add_user("alice")]) == 0
    assert loopback_hub.commits("alice/prior")[0].message == "Upload prior"
    assert main(["info", "alice/prior"]) == 0
    assert "K, deviations" in capsys.readouterr().out


def test_info_of_a_plain_model(tmp_path, capsys):
    make_model("vit").save_pretrained(tmp_path)
    assert main(["info", str(tmp_path)]) == 1
    assert "no saved posterior" in capsys.readouterr().err
