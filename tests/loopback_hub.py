"""A small Hugging Face Hub on 127.0.0.1 for the real, unmocked client.

Models only, all in memory. Every commit is an immutable snapshot. Files in LFS mode live on a second port, another
origin, as on the real Hub. Faults can be injected into any request. Not here: Xet, pull requests, gated repositories.
"""

import base64
import hashlib
import json
import re
import secrets
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LFS_SUFFIXES = (".bin", ".ckpt", ".h5", ".npy", ".npz", ".onnx", ".pt", ".pth", ".safetensors", ".zip")
GITATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()

Fault = Literal["500", "cut", "slow", "truncate"]


class Request(NamedTuple):
    """One request that was seen; status 0 if the connection was cut instead of an answer."""

    method: str
    path: str
    status: int


@dataclass(frozen=True)
class Commit:
    """One immutable snapshot of a repository; `lfs` names the paths that are in LFS mode."""

    sha: str
    parents: tuple[str, ...]
    message: str
    files: dict[str, bytes]
    lfs: frozenset[str]
    author: str
    date: str

    def oid(self, path: str) -> str:
        """Name of the blob in git: for LFS that of the pointer file."""
        return _git_blob_oid(_lfs_pointer(self.files[path]) if path in self.lfs else self.files[path])

    def etag(self, path: str) -> str:
        """Name of the content: its sha256 in LFS mode, else the blob's name in git."""
        return hashlib.sha256(self.files[path]).hexdigest() if path in self.lfs else self.oid(path)


@dataclass
class Repo:
    """Branches and tags that name commits, and the LFS objects uploaded so far."""

    id: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        return self.id.split("/")[0]

    def at(self, revision: str) -> Commit:
        """The commit that a branch, a tag or a sha names."""
        sha = self.branches.get(revision) or self.tags.get(revision) or revision
        if sha not in self.commits:
            raise _Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[sha]

    def add_commit(self, branch: str, author: str, message: str, files: dict[str, bytes], lfs: set[str]) -> Commit:
        parents = (self.branches[branch],) if branch in self.branches else ()
        oids = {path: hashlib.sha256(content).hexdigest() for path, content in sorted(files.items())}
        sha = hashlib.sha1(json.dumps([self.id, parents, message, oids, sorted(lfs)]).encode()).hexdigest()
        date = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        commit = Commit(sha, parents, message, files, frozenset(lfs), author, date)
        self.commits[sha] = commit
        self.branches[branch] = sha
        return commit


class LoopbackHub:
    """A Hub that runs inside `with`.

    Args:
        lfs_threshold: Larger files are in LFS mode, as are weights and other binary files of any size.

    >>> import urllib.request
    >>> with LoopbackHub() as hub:
    ...     headers = {"Authorization": f"Bearer {hub.add_user('alice')}"}
    ...     request = urllib.request.Request(f"{hub.endpoint}/api/whoami-v2", headers=headers)
    ...     name = json.load(urllib.request.urlopen(request))["name"]
    >>> name, hub.requests
    ('alice', [Request(method='GET', path='/api/whoami-v2', status=200)])
    """

    def __init__(self, lfs_threshold: int = 10 * 2**20):
        self.lfs_threshold = lfs_threshold
        self.requests: list[Request] = []
        self.bytes_sent = 0  # content of files in answers to GET
        self._users: dict[str, str] = {}  # by token
        self._repos: dict[str, Repo] = {}
        self._faults: list[_Fault] = []
        self._storage_secret = secrets.token_bytes()
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._hub_server = _Server(self, self._answer_hub)
        self._storage_server = _Server(self, self._answer_storage)
        self.endpoint = self._hub_server.origin

    def __enter__(self) -> "LoopbackHub":
        for server in (self._hub_server, self._storage_server):
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._stopped.set()
        for server in (self._hub_server, self._storage_server):
            server.shutdown()
            server.server_close()

    def add_user(self, name: str) -> str:
        """A new user; returns a token that may write into the user's own namespace."""
        token = f"hf_{name}{secrets.token_hex(8)}"
        self._users[token] = name
        return token

    def commits(self, repo_id: str, revision: str = "main") -> list[Commit]:
        """Commits that a visitor with access sees, newest first; none if there is no such repository."""
        with self._lock:
            return _history(self._repos[repo_id], revision) if repo_id in self._repos else []

    def fail(
        self,
        fault: Fault,
        *,
        method: str | None = None,
        path: str = "",
        at: int = 1,
        times: float = 1,
        seconds: float = 0.0,
    ) -> None:
        """Inject a fault into requests from now on.

        Of the requests with this method and a path in which the regular expression `path` is found (by default all),
        those numbered `at`, ..., `at + times - 1` suffer; paths on the storage's port start with /storage.

        Args:
            fault: `"500"` answers so and does nothing else; `"cut"` closes the connection before the request's body
                is read, and does nothing else; `"slow"` waits for `seconds` first; `"truncate"` does what was asked
                and sends only half of the answer's body (nothing if there is no body) under the full Content-Length.
            times: `math.inf` for an outage that lasts until `heal`.
        """
        if fault not in get_args(Fault):
            raise ValueError(f"fault must be one of {get_args(Fault)}, got {fault!r}")
        with self._lock:
            self._faults.append(_Fault(fault, method, re.compile(path), at, times, seconds))

    def heal(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._faults.clear()

    def env(self, cache_dir: str | Path, token: str = "") -> dict[str, str]:
        """Environment variables for a new process: this Hub, an empty cache, nothing that leaves the machine."""
        home = Path(cache_dir)
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_TOKEN": token,
            "HUGGING_FACE_HUB_TOKEN": "",
            "HF_OIDC_RESOURCE": "",
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "DISABLE_SAFETENSORS_CONVERSION": "1",  # asks a service on another host
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def _arrive(self, method: str, path: str) -> tuple[int, "_Fault | None"]:
        """Number of the new request, and the fault that it shall suffer."""
        with self._lock:
            self.requests.append(Request(method, path, 0))
            hits = [fault for fault in self._faults if fault.hits(method, path)]
            return len(self.requests) - 1, hits[0] if hits else None

    def _leave(self, number: int, status: int, file_bytes: int) -> None:
        with self._lock:
            self.requests[number] = self.requests[number]._replace(status=status)
            self.bytes_sent += file_bytes

    def _answer_hub(self, call: "_Call") -> "_Answer":
        user = self._user(call)
        match [call.method, *call.segments]:
            case ["GET", "api", "whoami-v2"]:
                if user is None:
                    raise _Refusal(401, "Invalid username or password.")
                token = {"displayName": "loopback", "role": "write"}
                return _json({"type": "user", "name": user, "orgs": [], "auth": {"accessToken": token}})
            case ["POST", "api", "validate-yaml"]:
                metadata, errors = read_card(call.json()["content"])
                warnings = [] if metadata or errors else ["empty or missing yaml metadata in repo card"]
                answer = {
                    "errors": [{"message": message} for message in errors],
                    "warnings": [{"message": message} for message in warnings],
                }
                return _json(answer, status=400 if errors else 200)
            case ["POST", "api", "repos", "create"]:
                return self._create_repo(user, call.json())
            case ["DELETE", "api", "repos", "delete"]:
                wanted = call.json()
                repo = self._repo(f"{wanted.get('organization') or user}/{wanted['name']}", user, write=True)
                del self._repos[repo.id]
                return _json({})
            case ["GET", "api", "models", owner, name, *rest]:
                return self._answer_reading(self._repo(f"{owner}/{name}", user), call, rest)
            case ["POST", "api", "models", owner, name, "paths-info", revision]:
                commit = self._repo(f"{owner}/{name}", user).at(revision)
                paths = parse_qs(call.body.decode()).get("paths", [])
                tree = {entry["path"]: entry for entry in _tree(commit, "", recursive=True)}
                return _json([tree[path] for path in paths if path in tree])
            case [_, "api", "models", owner, name, *rest]:
                return self._answer_writing(self._repo(f"{owner}/{name}", user, write=True), call, rest)
            case ["GET", owner, name, "resolve", revision, *path]:
                return self._resolve(self._repo(f"{owner}/{name}", user), revision, "/".join(path), call)
            case ["POST", owner, name, "info", "lfs", "objects", action]:
                repo = self._repo(f"{owner}/{name.removesuffix('.git')}", user, write=True)
                return self._lfs(repo, action, call.json())
        raise _Refusal(404, f"The loopback Hub has no {call.method} /{'/'.join(call.segments)}")

    def _user(self, call: "_Call") -> str | None:
        """Name of the user whose token came with the request, None without one."""
        token = call.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self._users:
            raise _Refusal(401, "Invalid credentials in Authorization header")
        return self._users.get(token)

    def _repo(self, repo_id: str, user: str | None, write: bool = False) -> Repo:
        """The repository, if this user may read it, or write to it."""
        repo = self._repos.get(repo_id)
        # The client takes any 401 of an https:// Hub on these paths for a missing repository; here it needs the code.
        if repo is None or (repo.private and user != repo.owner):
            raise _Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        if write and user is None:
            raise _Refusal(401, "Invalid username or password.", "RepoNotFound")
        if write and user != repo.owner:
            raise _Refusal(403, f"{user} has no right to write to {repo_id}")
        return repo

    def _create_repo(self, user: str | None, wanted: dict) -> "_Answer":
        if user is None:
            raise _Refusal(401, "Invalid username or password.")
        if wanted.get("type", "model") != "model":
            raise _Refusal(400, "The loopback Hub has models only")
        owner = wanted.get("organization") or user
        if owner != user:
            raise _Refusal(403, f"{user} has no right to create a model under {owner}")
        repo_id = f"{owner}/{wanted['name']}"
        answer = {"url": f"{self.endpoint}/{repo_id}"}
        if repo_id in self._repos:
            return _json(answer | {"error": "You already created this model repo"}, status=409)
        repo = Repo(repo_id, private=wanted.get("visibility") == "private")
        repo.add_commit("main", user, "initial commit", {".gitattributes": GITATTRIBUTES}, set())
        self._repos[repo_id] = repo
        return _json(answer)

    def _answer_reading(self, repo: Repo, call: "_Call", rest: list[str]) -> "_Answer":
        match rest:
            case [] | ["revision", _]:
                return _json(_model_info(repo, repo.at(rest[1] if rest else "main"), blobs="blobs" in call.query))
            case ["tree", revision, *folder]:
                recursive = call.query.get("recursive", ["false"])[0].lower() == "true"
                return _json(_tree(repo.at(revision), "/".join(folder), recursive))
            case ["commits", revision]:
                return _json(
                    [
                        {
                            "id": commit.sha,
                            "title": commit.message.partition("\n")[0],
                            "message": commit.message.partition("\n")[2].strip(),
                            "authors": [{"user": commit.author}],
                            "date": commit.date,
                        }
                        for commit in _history(repo, revision)
                    ]
                )
            case ["refs"]:
                return _json(
                    {
                        "branches": _refs("heads", repo.branches),
                        "tags": _refs("tags", repo.tags),
                        "converts": [],
                        "pullRequests": [],
                    }
                )
            case ["discussions"]:
                return _json({"discussions": [], "count": 0, "start": 0})
        raise _Refusal(404, f"The loopback Hub has no GET {'/'.join(rest)} of a model")

    def _answer_writing(self, repo: Repo, call: "_Call", rest: list[str]) -> "_Answer":
        if "create_pr" in call.query:
            raise _Refusal(501, "The loopback Hub has no pull requests")
        match [call.method, *rest]:
            case ["POST", "preupload", revision]:
                commit = repo.at(revision)
                return _json({"files": [self._upload_mode(commit, file) for file in call.json()["files"]]})
            case ["POST", "commit", branch]:
                commit = self._commit(repo, branch, call.body)
                url = f"{self.endpoint}/{repo.id}/commit/{commit.sha}"
                return _json({"success": True, "commitOid": commit.sha, "commitUrl": url})
            case ["POST", "branch", name]:
                return _add_ref(repo.branches, name, repo.at(call.json().get("startingPoint", "main")))
            case ["POST", "tag", revision]:
                return _add_ref(repo.tags, call.json()["tag"], repo.at(revision))
            case ["DELETE", "branch" | "tag" as kind, name]:
                refs = repo.branches if kind == "branch" else repo.tags
                if name == "main" or name not in refs:
                    raise _Refusal(404, f"No {kind} {name} that can be deleted", "RevisionNotFound")
                del refs[name]
                return _json({})
        raise _Refusal(404, f"The loopback Hub has no {call.method} {'/'.join(rest)} of a model")

    def _upload_mode(self, commit: Commit, file: dict) -> dict:
        path = file["path"]
        # a NUL byte is how git tells binary files
        binary = path.endswith(LFS_SUFFIXES) or b"\0" in base64.b64decode(file["sample"])
        mode = "lfs" if binary or file["size"] > self.lfs_threshold else "regular"
        known = {"oid": commit.etag(path)} if path in commit.files else {}
        return {"path": path, "uploadMode": mode, "shouldIgnore": False} | known

    def _lfs(self, repo: Repo, action: str, wanted: dict) -> "_Answer":
        if action == "verify":
            if len(repo.lfs.get(wanted["oid"], b"")) != wanted["size"]:
                raise _Refusal(404, f"LFS object {wanted['oid']} was not uploaded")
            return _json({})
        objects = []
        for file in wanted["objects"]:
            answer = {"oid": file["oid"], "size": file["size"]}
            if file["oid"] not in repo.lfs:
                verify = {"href": f"{self.endpoint}/{repo.id}.git/info/lfs/objects/verify"}
                answer["actions"] = {"upload": {"href": self._storage_url(repo, file["oid"])}, "verify": verify}
            objects.append(answer)
        return _json({"transfer": "basic", "objects": objects})

    def _commit(self, repo: Repo, branch: str, body: bytes) -> Commit:
        """All of the body or nothing: whatever is wrong is found before the branch moves."""
        if branch not in repo.branches:
            raise _Refusal(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        header, *operations = [json.loads(line) for line in body.splitlines()]
        if header["key"] != "header":
            raise ValueError("the first line must be the header")
        if header["value"].get("parentCommit") not in (None, repo.branches[branch]):
            raise _Refusal(412, "A commit has happened since. Please refresh and try again.")
        parent = repo.at(branch)
        files, lfs = dict(parent.files), set(parent.lfs)
        for operation in operations:
            path = operation["value"]["path"]
            match operation["key"]:
                case "file":
                    files[path] = base64.b64decode(operation["value"]["content"], validate=True)
                    lfs.discard(path)
                case "lfsFile":
                    content = repo.lfs.get(operation["value"]["oid"])
                    if content is None or len(content) != operation["value"].get("size", len(content)):
                        raise _Refusal(400, f"{path} points to an LFS object that was not uploaded")
                    files[path] = content
                    lfs.add(path)
                case "deletedFile" | "deletedFolder" as kind:
                    inside = path.rstrip("/") + "/"
                    gone = {name for name in files if (name + "/").startswith(inside)}
                    if kind == "deletedFile":
                        gone &= {path}
                    if not gone:
                        raise _Refusal(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
                    files = {name: content for name, content in files.items() if name not in gone}
                    lfs -= gone
                case unknown:
                    raise ValueError(f"unknown operation {unknown}")
        _, errors = read_card(files.get("README.md", b"").decode())
        if errors:
            raise _Refusal(400, f"Invalid metadata in README.md: {errors}")
        message = "\n\n".join(filter(None, [header["value"]["summary"], header["value"].get("description")]))
        return repo.add_commit(branch, repo.owner, message, files, lfs)

    def _resolve(self, repo: Repo, revision: str, path: str, call: "_Call") -> "_Answer":
        commit = repo.at(revision)
        headers = {"X-Repo-Commit": commit.sha}
        if path not in commit.files:
            raise _Refusal(404, "Entry not found", "EntryNotFound", headers)
        etag = commit.etag(path)
        if path not in commit.lfs:
            return _file(commit.files[path], call, headers | {"ETag": f'"{etag}"'})
        headers |= {
            "Location": self._storage_url(repo, etag),
            "X-Linked-Etag": f'"{etag}"',
            "X-Linked-Size": str(len(commit.files[path])),
        }
        return _Answer(302, b"Found. Redirecting to the storage.", headers)

    def _storage_url(self, repo: Repo, oid: str) -> str:
        """Whoever has this address may use it, as with signed addresses of a storage service."""
        return f"{self._storage_server.origin}/storage/{repo.id}/{oid}?signature={self._signature(repo.id, oid)}"

    def _signature(self, repo_id: str, oid: str) -> str:
        return hashlib.blake2b(f"{repo_id}/{oid}".encode(), key=self._storage_secret).hexdigest()

    def _answer_storage(self, call: "_Call") -> "_Answer":
        _, owner, name, oid = call.segments
        repo = self._repos.get(f"{owner}/{name}")
        if "Authorization" in call.headers:
            raise _Refusal(400, "Only one auth mechanism allowed: a token of the Hub must not come here")
        if repo is None or call.query.get("signature") != [self._signature(repo.id, oid)]:
            raise _Refusal(403, "SignatureDoesNotMatch")
        if call.method == "PUT":
            if hashlib.sha256(call.body).hexdigest() != oid:
                raise _Refusal(400, "The content does not match its sha256")
            repo.lfs[oid] = call.body
            return _Answer(200)
        if oid not in repo.lfs:
            raise _Refusal(404, "NoSuchKey")
        return _file(repo.lfs[oid], call, {"ETag": f'"{oid}"'})


# Types of what a list of evaluation results must hold; the Hub refuses a card without.
_MODEL_INDEX = [
    {
        "name": str,
        "results": [
            {
                "task": {"type": str},
                "dataset": {"name": str, "type": str},
                "metrics": [{"type": str, "value": object}],
            }
        ],
    }
]


def read_card(content: str) -> tuple[dict, list[str]]:
    """Metadata in the YAML header of a card, and what is wrong with it.

    >>> read_card("---\\nlicense: mit\\n---\\n# Title")
    ({'license': 'mit'}, [])
    >>> read_card("---\\nmodel-index:\\n- name: m\\n---")[1]
    ['"model-index[0].results" is required']
    """
    header = re.match(r"\s*---\r?\n(.*?)\r?\n---\s*?(\n|$)", content, flags=re.DOTALL)
    if header is None:
        return {}, []
    try:
        metadata = yaml.safe_load(header[1])
    except yaml.YAMLError as error:
        return {}, [f"The YAML header cannot be parsed: {error}"]
    if metadata is None:
        return {}, []
    if not isinstance(metadata, dict):
        return {}, [f"The YAML header must be a mapping, got {metadata!r}"]
    schema = {key: kind for key, kind in {"license": str, "model-index": _MODEL_INDEX}.items() if key in metadata}
    return metadata, _schema_errors(metadata, schema, "")


def _schema_errors(value: Any, schema: Any, path: str) -> list[str]:
    if isinstance(schema, type):
        return [] if isinstance(value, schema) else [f'"{path}" must be a {schema.__name__}']
    if not isinstance(value, type(schema)):
        return [f'"{path}" must be a {type(schema).__name__}']
    errors = []
    if isinstance(schema, list):
        for index, item in enumerate(value):
            errors += _schema_errors(item, schema[0], f"{path}[{index}]")
        return errors
    for key, inner in schema.items():
        inner_path = f"{path}.{key}" if path else key
        errors += _schema_errors(value[key], inner, inner_path) if key in value else [f'"{inner_path}" is required']
    return errors


def _git_blob_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _lfs_pointer(content: bytes) -> bytes:
    oid = hashlib.sha256(content).hexdigest()
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(content)}\n".encode()


def _history(repo: Repo, revision: str) -> list[Commit]:
    history = [repo.at(revision)]
    while history[-1].parents:
        history.append(repo.commits[history[-1].parents[0]])
    return history


def _refs(kind: str, refs: dict[str, str]) -> list[dict]:
    return [{"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": sha} for name, sha in refs.items()]


def _add_ref(refs: dict[str, str], name: str, commit: Commit) -> "_Answer":
    if name in refs:
        raise _Refusal(409, f"Reference {name} exists already")
    refs[name] = commit.sha
    return _json({})


def _tree(commit: Commit, folder: str, recursive: bool) -> list[dict]:
    """Files and folders inside `folder`, the whole commit if it is empty."""
    prefix = f"{folder}/" if folder else ""
    folders, files = {}, []
    for path in sorted(commit.files):
        if not path.startswith(prefix):
            continue
        parts = path.removeprefix(prefix).split("/")
        for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
            name = prefix + "/".join(parts[:depth])
            folders[name] = {"type": "directory", "oid": _git_blob_oid(name.encode()), "size": 0, "path": name}
        if not recursive and len(parts) > 1:
            continue
        entry = {"type": "file", "oid": commit.oid(path), "size": len(commit.files[path]), "path": path}
        if path in commit.lfs:
            pointer_size = len(_lfs_pointer(commit.files[path]))
            entry["lfs"] = {"oid": commit.etag(path), "size": entry["size"], "pointerSize": pointer_size}
        files.append(entry)
    if folder and not files and not folders:
        raise _Refusal(404, f"{folder} does not exist on this revision", "EntryNotFound")
    return [*folders.values(), *files]


def _model_info(repo: Repo, commit: Commit, blobs: bool) -> dict:
    card, _ = read_card(commit.files.get("README.md", b"").decode())
    siblings = []
    for entry in _tree(commit, "", recursive=True):
        if entry["type"] == "file":
            siblings.append({"rfilename": entry["path"]})
            if blobs:
                siblings[-1] |= {"size": entry["size"], "blobId": entry["oid"]}
                if "lfs" in entry:
                    siblings[-1]["lfs"] = entry["lfs"] | {"sha256": entry["lfs"]["oid"]}
    return {
        "id": repo.id,
        "author": repo.owner,
        "sha": commit.sha,
        "lastModified": commit.date,
        "private": repo.private,
        "gated": False,
        "disabled": False,
        "tags": card.get("tags") or [],
        "library_name": card.get("library_name"),
        "pipeline_tag": card.get("pipeline_tag"),
        "cardData": card,
        "siblings": siblings,
    }


@dataclass
class _Fault:
    kind: Fault
    method: str | None
    path: re.Pattern
    at: int
    times: float
    seconds: float
    seen: int = 0

    def hits(self, method: str, path: str) -> bool:
        if self.method not in (None, method) or not self.path.search(path):
            return False
        self.seen += 1
        return self.at <= self.seen < self.at + self.times


class _Refusal(Exception):  # noqa: N818 - an answer, not a failure
    def __init__(self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message.encode("unicode_escape").decode()} | (headers or {})
        if code is not None:
            self.headers["X-Error-Code"] = code


@dataclass
class _Call:
    method: str  # HEAD is a GET whose answer is sent without its body
    segments: list[str]
    query: dict[str, list[str]]
    headers: Any
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class _Answer:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    is_file: bool = False


def _json(payload: Any, status: int = 200, headers: dict[str, str] | None = None) -> _Answer:
    # YAML metadata may hold dates
    body = json.dumps(payload, default=str).encode()
    return _Answer(status, body, {"Content-Type": "application/json"} | (headers or {}))


def _file(content: bytes, call: _Call, headers: dict[str, str]) -> _Answer:
    """The content, or the range of it that was asked for."""
    headers = headers | {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
    wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", call.headers.get("Range", ""))
    if wanted is None:
        return _Answer(200, content, headers, is_file=True)
    first, last = wanted.groups()
    start = int(first) if first else max(0, len(content) - int(last))
    stop = min(int(last) + 1, len(content)) if first and last else len(content)
    if start >= stop:
        raise _Refusal(416, "Range Not Satisfiable", headers={"Content-Range": f"bytes */{len(content)}"})
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
    return _Answer(206, content[start:stop], headers, is_file=True)


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # a client that finds the queue full waits for a second

    def __init__(self, hub: LoopbackHub, answer: Callable[[_Call], _Answer]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self.answer = answer
        self.origin = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves early is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # header and body are two writes: the second would wait for 40 ms

    def _handle(self) -> None:
        hub, url = self.server.hub, urlsplit(self.path)
        number, fault = hub._arrive(self.command, url.path)
        kind = fault.kind if fault else None
        if kind == "slow":
            hub._stopped.wait(fault.seconds)
        size = int(self.headers.get("Content-Length", 0))
        body = b"" if kind == "cut" else self.rfile.read(size)
        if kind == "cut" or len(body) < size:
            self.close_connection = True
            return
        call = _Call(
            "GET" if self.command == "HEAD" else self.command,
            [unquote(segment) for segment in url.path.strip("/").split("/")],
            parse_qs(url.query),
            self.headers,
            body,
        )
        answer = _json({"error": "Internal Server Error"}, 500) if kind == "500" else self._answer(call)
        sent = b"" if self.command == "HEAD" else answer.body
        if kind == "truncate":
            self.close_connection = True
            sent = sent[: len(sent) // 2]
        # before anything is sent: who has the answer shall find it counted
        nothing_sent = kind == "truncate" and not sent
        hub._leave(number, 0 if nothing_sent else answer.status, len(sent) if answer.is_file else 0)
        if nothing_sent:
            return
        self.send_response(answer.status)
        for name, value in (answer.headers | {"Content-Length": str(len(answer.body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(sent)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815 - the base class looks for these names

    def _answer(self, call: _Call) -> _Answer:
        with self.server.hub._lock:
            try:
                return self.server.answer(call)
            except _Refusal as refusal:
                return _json({"error": str(refusal)}, refusal.status, refusal.headers)
            except (KeyError, TypeError, ValueError) as error:
                return _json({"error": f"Malformed request: {error!r}"}, 400)

    def log_message(self, *_) -> None:
        """The list of requests is the log."""
