"""The loopback Hub, driven by the real client."""

import base64
import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import IS_HUB_CLIENT_1, make_model
from huggingface_hub import (
    CommitOperationAdd,
    HfApi,
    ModelCard,
    constants,
    get_hf_file_metadata,
    hf_api,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import get_session
from loopback_hub import GITATTRIBUTES, Commit, LoopbackHub
from transformers import AutoModelForImageClassification

if IS_HUB_CLIENT_1:
    import httpx
else:
    from huggingface_hub.utils import httpx  # httpx2

CARD = b"---\nlicense: mit\ntags:\n- de-elbo\n---\n# A model\n"
FILES = {
    "README.md": CARD,
    "config.json": b'{"layers": 2}',
    "model.safetensors": bytes(range(256)) * 20,
    "figures/curve.svg": b"<svg/>",
}
PUSH_ERRORS = (HfHubHTTPError, httpx.TransportError, RuntimeError)


@pytest.fixture
def hub(loopback_hub) -> LoopbackHub:
    return loopback_hub


@pytest.fixture
def alice(hub) -> HfApi:
    return HfApi(token=hub.add_user("alice"))


@pytest.fixture
def folder(tmp_path) -> Path:
    return write(tmp_path / "folder", FILES)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def read(folder: str | Path) -> dict[str, bytes]:
    paths = (path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def push(api: HfApi, repo_id: str, folder: Path, **kwargs) -> str:
    api.create_repo(repo_id, exist_ok=True, **kwargs)
    return api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Push").oid


def pushed(hub: LoopbackHub, repo_id: str) -> list[Commit]:
    return [commit for commit in hub.commits(repo_id) if commit.message == "Push"]


def test_push_is_one_commit(hub, alice, folder):
    assert alice.whoami()["name"] == "alice"
    sha = push(alice, "alice/model", folder)
    newest, first = hub.commits("alice/model")
    assert newest.sha == sha
    assert newest.parents == (first.sha,)
    assert first.files == {".gitattributes": GITATTRIBUTES}
    assert newest.files == FILES | first.files
    assert newest.lfs == {"model.safetensors"}
    # nothing new: nothing to commit
    assert push(alice, "alice/model", folder) == sha
    assert len(hub.commits("alice/model")) == 2


def test_download_gives_the_same_bytes_once(hub, alice, folder):
    sha = push(alice, "alice/model", folder)
    path = snapshot_download("alice/model")
    assert Path(path).name == sha
    assert read(path) == FILES | {".gitattributes": GITATTRIBUTES}
    assert hub.bytes_sent == sum(map(len, read(path).values()))
    before = hub.bytes_sent
    assert snapshot_download("alice/model") == path
    assert hub.bytes_sent == before


def test_metadata_of_files(hub, alice, tmp_path):
    # names that git and sha256sum give to these contents
    blob = "3b18e512dba79e4c8300dd08aeb37f8e728b8dad"
    pointer = "0db788d9cca75b69bc4c2430024a654fafdb504e"
    sha256 = "a948904f2f0f479b8f8197694b30184b0d2ed1c1cd2a1ec0fb85d299a192a447"
    content = b"hello world\n"
    sha = push(alice, "alice/model", write(tmp_path / "folder", {"note.txt": content, "note.bin": content}))
    regular, lfs = (get_hf_file_metadata(hf_hub_url("alice/model", name)) for name in ("note.txt", "note.bin"))
    assert (regular.etag, lfs.etag) == (blob, sha256)
    assert (regular.commit_hash, lfs.commit_hash) == (sha, sha)
    assert (regular.size, lfs.size) == (len(content), len(content))
    assert regular.location.startswith(hub.endpoint)
    assert not lfs.location.startswith(hub.endpoint)
    siblings = {file.rfilename: file for file in alice.model_info("alice/model", files_metadata=True).siblings}
    assert siblings["note.txt"].blob_id == blob
    assert siblings["note.bin"].lfs.sha256 == sha256
    assert siblings["note.bin"].blob_id == pointer


def test_large_and_binary_files_are_in_lfs_mode(tmp_path, alice, hub):
    hub.lfs_threshold = 100
    push(alice, "alice/model", write(tmp_path / "folder", {"long": b"x" * 101, "short": b"x" * 100, "image": b"\0"}))
    assert hub.commits("alice/model")[0].lfs == {"long", "image"}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_range(hub, alice, folder, name):
    push(alice, "alice/model", folder)
    for asked, got in {"2-5": slice(2, 6), "7-": slice(7, None), "-3": slice(-3, None)}.items():
        before = hub.bytes_sent
        response = get_session().get(hf_hub_url("alice/model", name), headers={"Range": f"bytes={asked}"})
        assert response.status_code == 206
        assert response.content == FILES[name][got]
        assert hub.bytes_sent - before == len(FILES[name][got])
    outside = get_session().get(hf_hub_url("alice/model", name), headers={"Range": "bytes=99999-"})
    assert outside.status_code == 416


def test_revisions(hub, alice, folder):
    first = push(alice, "alice/model", folder)
    alice.create_tag("alice/model", tag="v1")
    alice.create_branch("alice/model", branch="try/two")
    write(folder, {"config.json": b"{}"})
    second = alice.upload_folder(repo_id="alice/model", folder_path=folder, revision="try/two").oid
    for revision, content in {
        None: FILES["config.json"],
        "v1": FILES["config.json"],
        first: FILES["config.json"],
        "try/two": b"{}",
        second: b"{}",
    }.items():
        assert Path(hf_hub_download("alice/model", "config.json", revision=revision)).read_bytes() == content
        assert read(snapshot_download("alice/model", revision=revision))["config.json"] == content
    refs = alice.list_repo_refs("alice/model")
    assert {branch.name: branch.target_commit for branch in refs.branches} == {"main": first, "try/two": second}
    assert {tag.name: tag.target_commit for tag in refs.tags} == {"v1": first}
    assert [commit.commit_id for commit in alice.list_repo_commits("alice/model", revision="try/two")][:2] == [
        second,
        first,
    ]
    with pytest.raises(HfHubHTTPError, match="409"):
        alice.create_tag("alice/model", tag="v1")
    alice.delete_tag("alice/model", tag="v1")
    alice.delete_branch("alice/model", branch="try/two")
    assert [branch.name for branch in alice.list_repo_refs("alice/model").branches] == ["main"]
    assert not alice.list_repo_refs("alice/model").tags


def test_what_is_missing(hub, alice, folder):
    push(alice, "alice/model", folder)
    with pytest.raises(RevisionNotFoundError):
        snapshot_download("alice/model", revision="v2")
    with pytest.raises(RevisionNotFoundError):
        alice.upload_folder(repo_id="alice/model", folder_path=folder, revision="v2")
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download("alice/model", "adapter_config.json")
    with pytest.raises(RemoteEntryNotFoundError):
        list(alice.list_repo_tree("alice/model", "additional_chat_templates"))
    with pytest.raises(RepositoryNotFoundError, match="404"):
        alice.model_info("alice/other")
    with pytest.raises(RepositoryNotFoundError, match="401"):
        HfApi(token=False).model_info("alice/other")
    assert list(alice.get_repo_discussions("alice/model")) == []


def test_tree(alice, folder):
    push(alice, "alice/model", folder)
    assert sorted(alice.list_repo_files("alice/model")) == sorted([".gitattributes", *FILES])
    top = {entry.path for entry in alice.list_repo_tree("alice/model")}
    assert top == {".gitattributes", "README.md", "config.json", "figures", "model.safetensors"}
    assert [entry.path for entry in alice.list_repo_tree("alice/model", "figures")] == ["figures/curve.svg"]
    (info,) = alice.get_paths_info("alice/model", ["config.json", "absent"])
    assert (info.path, info.size) == ("config.json", len(FILES["config.json"]))


def test_deletion(hub, alice, folder):
    push(alice, "alice/model", folder)
    alice.delete_file("model.safetensors", repo_id="alice/model")
    alice.delete_folder("figures", repo_id="alice/model")
    newest, before, pushed_commit, _ = hub.commits("alice/model")
    assert newest.files.keys() == {".gitattributes", "README.md", "config.json"}
    assert before.files.keys() == newest.files.keys() | {"figures/curve.svg"}
    assert pushed_commit.files.keys() == before.files.keys() | {"model.safetensors"}
    with pytest.raises(RemoteEntryNotFoundError):
        alice.delete_file("model.safetensors", repo_id="alice/model")
    alice.delete_repo("alice/model")
    assert hub.commits("alice/model") == []
    assert not alice.repo_exists("alice/model")


def test_stale_parent_is_refused(hub, alice, folder):
    push(alice, "alice/model", folder)
    newest, first = hub.commits("alice/model")

    def commit(parent: str) -> None:
        operations = [CommitOperationAdd("new.txt", b"new")]
        alice.create_commit("alice/model", operations, commit_message="New", parent_commit=parent)

    with pytest.raises(HfHubHTTPError, match="412"):
        commit(first.sha)
    assert hub.commits("alice/model") == [newest, first]
    commit(newest.sha)
    assert hub.commits("alice/model")[0].files["new.txt"] == b"new"


def test_create_repo_twice(alice):
    url = alice.create_repo("alice/model")
    with pytest.raises(HfHubHTTPError, match="409"):
        alice.create_repo("alice/model")
    assert alice.create_repo("model", exist_ok=True) == url
    assert not alice.model_info("alice/model").private


def test_private_repository(hub, alice, folder):
    push(alice, "alice/secret", folder, private=True)
    bob = hub.add_user("bob")
    with pytest.raises(RepositoryNotFoundError, match="401"):
        snapshot_download("alice/secret", token=False)
    with pytest.raises(RepositoryNotFoundError, match="401"):
        hf_hub_download("alice/secret", "model.safetensors", token=False)
    with pytest.raises(RepositoryNotFoundError, match="404"):
        snapshot_download("alice/secret", token=bob)
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        snapshot_download("alice/secret", token="hf_wrong")
    # the storage knows no users: there, an address without its signature is worth nothing
    address = get_hf_file_metadata(hf_hub_url("alice/secret", "model.safetensors"), token=alice.token).location
    assert get_session().get(address.partition("?")[0]).status_code == 403
    assert hub.bytes_sent == 0
    assert alice.model_info("alice/secret").private
    assert read(snapshot_download("alice/secret", token=alice.token)).items() >= FILES.items()


@pytest.mark.parametrize("private", [False, True])
def test_only_the_owner_pushes(hub, alice, folder, private):
    with pytest.raises(HfHubHTTPError, match="401"):
        HfApi(token=False).create_repo("alice/model")
    bob = HfApi(token=hub.add_user("bob"))
    with pytest.raises(HfHubHTTPError, match="403"):
        bob.create_repo("alice/model")
    assert hub.commits("alice/model") == []

    alice.create_repo("alice/model", private=private)
    for api, status in {HfApi(token=False): 401, HfApi(token="hf_wrong"): 401, bob: 404 if private else 403}.items():
        with pytest.raises(HfHubHTTPError) as refused:
            api.upload_folder(repo_id="alice/model", folder_path=folder)
        assert refused.value.response.status_code == status
        with pytest.raises(HfHubHTTPError):
            api.delete_repo("alice/model")
    assert len(hub.commits("alice/model")) == 1
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        HfApi(token="hf_wrong").whoami()


@pytest.mark.parametrize("times", [1, math.inf])
@pytest.mark.parametrize("fault", ["500", "cut"])
def test_push_is_all_or_nothing(hub, alice, folder, fault, times):
    push(alice, "alice/clean", folder)
    requests = len(hub.requests)
    assert requests >= 7  # create, validate twice, preupload, batch, upload, verify, commit
    for number in range(1, requests + 1):
        repo_id = f"alice/model{number}"
        hub.fail(fault, at=number, times=times)
        try:
            push(alice, repo_id, folder)
        except PUSH_ERRORS:
            assert pushed(hub, repo_id) == []
            hub.heal()
            push(alice, repo_id, folder)
        else:
            # one fault may be overcome by another attempt of the client, an outage may not
            assert times == 1
        (commit,) = pushed(hub, repo_id)
        assert commit.files == FILES | {".gitattributes": GITATTRIBUTES}
        hub.heal()


def test_commit_whose_answer_is_lost(hub, alice, folder):
    hub.fail("truncate", path="/commit/main$")
    with pytest.raises(httpx.RemoteProtocolError):
        push(alice, "alice/model", folder)
    (commit,) = pushed(hub, "alice/model")
    assert push(alice, "alice/model", folder) == commit.sha
    assert pushed(hub, "alice/model") == [commit]


def commit_lines(*operations: dict) -> bytes:
    lines = [{"key": "header", "value": {"summary": "Push", "description": ""}}, *operations]
    return b"\n".join(json.dumps(line).encode() for line in lines)


GOOD_FILE = {"key": "file", "value": {"path": "a.txt", "content": base64.b64encode(b"a").decode()}}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (commit_lines(GOOD_FILE), 200),
        (commit_lines(GOOD_FILE)[:-5], 400),
        (commit_lines(GOOD_FILE).partition(b"\n")[2], 400),
        (commit_lines(GOOD_FILE, {"key": "rename", "value": {"path": "a.txt"}}), 400),
        (commit_lines(GOOD_FILE, {"key": "file", "value": {"path": "b.txt", "content": "?"}}), 400),
        (commit_lines(GOOD_FILE, {"key": "lfsFile", "value": {"path": "b.bin", "oid": "0" * 64, "size": 3}}), 400),
        (commit_lines(GOOD_FILE, {"key": "deletedFile", "value": {"path": "b.txt"}}), 404),
    ],
)
def test_half_a_commit_is_none(hub, alice, body, status):
    alice.create_repo("alice/model")
    address = f"{hub.endpoint}/api/models/alice/model/commit/main"
    headers = {"Authorization": f"Bearer {alice.token}"}
    assert get_session().post(address, content=body, headers=headers).status_code == status
    assert [commit.files["a.txt"] for commit in pushed(hub, "alice/model")] == ([b"a"] if status == 200 else [])


def test_storage_takes_only_what_was_announced(hub, alice):
    alice.create_repo("alice/model")
    headers = {"Authorization": f"Bearer {alice.token}"}
    oid = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"  # sha256 of hello
    wanted = {"operation": "upload", "objects": [{"oid": oid, "size": 5}]}
    lfs = f"{hub.endpoint}/alice/model.git/info/lfs/objects"

    def batch() -> dict:
        (answer,) = get_session().post(f"{lfs}/batch", json=wanted, headers=headers).json()["objects"]
        return answer

    upload = batch()["actions"]["upload"]["href"]
    assert get_session().put(upload, content=b"hallo").status_code == 400
    assert get_session().put(upload, content=b"hello", headers=headers).status_code == 400
    assert get_session().put(upload[:-1], content=b"hello").status_code == 403
    verify = {"oid": oid, "size": 5}
    assert get_session().post(f"{lfs}/verify", json=verify, headers=headers).status_code == 404
    assert get_session().put(upload, content=b"hello").status_code == 200
    assert get_session().post(f"{lfs}/verify", json=verify, headers=headers).status_code == 200
    assert "actions" not in batch()
    size_differs = commit_lines({"key": "lfsFile", "value": {"path": "b.bin", "oid": oid, "size": 6}})
    address = f"{hub.endpoint}/api/models/alice/model/commit/main"
    assert get_session().post(address, content=size_differs, headers=headers).status_code == 400


@pytest.mark.parametrize("path", ["config.json", "/storage/"])
@pytest.mark.parametrize("fault", ["500", "cut", "truncate"])
def test_broken_download(hub, alice, folder, fault, path):
    push(alice, "alice/model", folder)
    hub.fail(fault, method="GET", path=path, times=math.inf)
    with pytest.raises((HfHubHTTPError, httpx.TransportError)):
        snapshot_download("alice/model")
    broken = {"config.json": "config.json", "/storage/": "model.safetensors"}[path]
    for snapshot in Path(constants.HF_HUB_CACHE).glob("*/snapshots/*"):
        assert not (snapshot / broken).exists()
    hub.heal()
    hub.fail(fault, method="GET", path=path)
    if fault == "500":
        with pytest.raises(HfHubHTTPError, match="500"):
            snapshot_download("alice/model")
    elif IS_HUB_CLIENT_1:
        with suppress(httpx.TransportError):
            snapshot_download("alice/model")
    # a broken connection the client mends itself
    assert read(snapshot_download("alice/model")).items() >= FILES.items()


@pytest.mark.skipif(IS_HUB_CLIENT_1, reason="slow downloads are tried again since huggingface_hub 2")
def test_slow_download(hub, alice, folder, monkeypatch):
    push(alice, "alice/model", folder)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    hub.fail("slow", method="GET", path="/storage/", seconds=30)
    start = time.perf_counter()
    path = hf_hub_download("alice/model", "model.safetensors")
    assert 0.5 < time.perf_counter() - start < 20
    assert Path(path).read_bytes() == FILES["model.safetensors"]
    assert [request.path for request in hub.requests if request.method == "GET"].count(hub.requests[-1].path) == 2


def test_faults_are_counted_from_when_they_are_set(hub):
    def statuses(*calls: tuple[str, str]) -> list[int]:
        return [get_session().request(method, hub.endpoint + path).status_code for method, path in calls]

    get, post = ("GET", "/api/models/a/b"), ("POST", "/api/models/a/b/preupload/main")
    assert statuses(get) == [401]
    hub.fail("500", at=2)
    assert statuses(get, post, get) == [401, 500, 401]
    hub.fail("500", method="POST", at=2, times=2)
    assert statuses(post, get, post, post, post) == [401, 401, 500, 500, 401]
    hub.fail("500", path="preupload", times=math.inf)
    assert statuses(get, post, post) == [401, 500, 500]
    hub.heal()
    assert statuses(post) == [401]
    hub.fail("cut")
    with pytest.raises(httpx.RemoteProtocolError):
        statuses(get)
    assert [request.status for request in hub.requests][-3:] == [500, 401, 0]
    with pytest.raises(ValueError, match="fault must be one of"):
        hub.fail("503")


RESULT = """
model-index:
- name: m
  results:
  - task: {type: image-classification}
    dataset: {name: d, type: d}
    metrics:
    - {type: accuracy, value: 0.5}
"""


@pytest.mark.parametrize(
    ("metadata", "error"),
    [
        ("license: mit", None),
        (RESULT, None),
        ("license: [mit", "cannot be parsed"),
        ("- license", "must be a mapping"),
        ("license: [mit]", '"license" must be a str'),
        ("model-index: m", '"model-index" must be a list'),
        (RESULT.replace("- name: m", "- title: m"), '"model-index[0].name" is required'),
        (RESULT.replace("dataset", "data"), '"model-index[0].results[0].dataset" is required'),
        (RESULT.replace(", value: 0.5", ""), '"model-index[0].results[0].metrics[0].value" is required'),
    ],
)
def test_card_is_checked(hub, alice, metadata, error):
    content = f"---\n{metadata}\n---\n# Title"
    answer = get_session().post(f"{hub.endpoint}/api/validate-yaml", json={"content": content, "repoType": "model"})
    assert answer.status_code == (200 if error is None else 400)
    messages = [item["message"] for item in answer.json()["errors"]]
    assert len(messages) == (error is not None)
    assert error is None or error in messages[0]
    # a commit is checked again: it may come from another client
    alice.create_repo("alice/model")
    file = {"path": "README.md", "content": base64.b64encode(content.encode()).decode()}
    address = f"{hub.endpoint}/api/models/alice/model/commit/main"
    headers = {"Authorization": f"Bearer {alice.token}"}
    commit = get_session().post(address, content=commit_lines({"key": "file", "value": file}), headers=headers)
    assert commit.status_code == answer.status_code


@pytest.mark.skipif(IS_HUB_CLIENT_1, reason="cards are validated at HF_ENDPOINT since huggingface_hub 2")
def test_client_hears_of_a_bad_card(alice):
    ModelCard(f"---\n{RESULT}---").validate()
    card = ModelCard("---\nlicense: [mit]\n---")
    with pytest.raises(ValueError, match="license"):
        card.validate()
    alice.create_repo("alice/model")
    with pytest.raises(ValueError, match="license"):
        alice.upload_file(path_or_fileobj=str(card).encode(), path_in_repo="README.md", repo_id="alice/model")


def test_card_metadata_comes_back(alice, folder):
    push(alice, "alice/model", folder)
    assert alice.model_info("alice/model").card_data.to_dict() == {"license": "mit", "tags": ["de-elbo"]}
    assert ModelCard.load("alice/model").data.license == "mit"
    with pytest.warns(UserWarning, match="empty or missing yaml metadata"):
        alice.upload_file(path_or_fileobj=b"# Title", path_in_repo="README.md", repo_id="alice/model")


def test_transformers(hub, alice, tmp_path):
    model = make_model("resnet").eval()
    model.push_to_hub("alice/model", private=True, token=alice.token, commit_message="Push")
    (commit,) = pushed(hub, "alice/model")
    assert commit.files.keys() >= {"README.md", "config.json", "model.safetensors"}
    images = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = model(images).logits

    before = len(hub.requests)
    loaded = AutoModelForImageClassification.from_pretrained("alice/model", token=alice.token)
    assert torch.equal(loaded(images).logits, expected)
    assert any(request.path.startswith("/storage/") for request in hub.requests[before:])
    with pytest.raises(OSError, match="not a valid model identifier"):
        AutoModelForImageClassification.from_pretrained("alice/model", cache_dir=tmp_path / "third", token=False)


def test_without_the_fixture_the_client_is_offline():
    assert constants.is_offline_mode()
    assert "127.0.0.1" not in constants.ENDPOINT
    assert hf_api.api.endpoint == constants.ENDPOINT
    assert os.environ["HF_HUB_OFFLINE"] == "1"
