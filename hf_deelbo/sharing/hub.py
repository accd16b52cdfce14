"""Saved tensors and the JSON that describes them, in a folder or on the Hub: hashed, checked when read, no pickle."""

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, hf_hub_download, snapshot_download
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    StrictDataclassError,
)
from safetensors.torch import save_file
from transformers.utils import logging

from ..weights.blocks import Tensors, check_finite
from .files import (
    WORKING_FOLDERS,
    finish_interrupted,
    sha256_of,
    write_json,
)
from .model_files import ADAPTER_CONFIG_FILE
from .reading import InvalidFilesError, blaming, check_regular, one_line, read_json

logger = logging.get_logger(__name__)

FORMAT_VERSION = 2
LIBRARIES = ("hf-deelbo", "transformers", "torch", "datasets", "safetensors", "huggingface-hub")
# what a run leaves beside a posterior: pickles, logs, checkpoints
UNPUBLISHED = (*WORKING_FOLDERS, ".*", "_*", "checkpoint-*", "runs", "*.bin", "*.pt", "*.pth", "*.pkl")
# what loading needs, at the top of a repository: not its figures and checkpoints
DOWNLOADED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")
SUBFOLDERS = "*/*"


def library_versions(*others: str) -> dict[str, str]:
    """What is installed of `LIBRARIES`, and of others."""
    return {name: version(name) for name in (*LIBRARIES, *others)}


class NotSavedError(InvalidFilesError):
    """There are no such files at all: what was named is something else."""


@strict
@dataclass
class SavedConfig:
    """A JSON file that describes the tensors beside it.

    Attributes:
        sha256: hash of each file that belongs to it, by name.
        library_versions: what it was written with.
        format_version: raised when older code could not read it rightly.
    """

    CONFIG_FILE: ClassVar[str]
    TENSORS_FILE: ClassVar[str]
    WHAT: ClassVar[str]

    sha256: dict[str, str]
    library_versions: dict[str, str] = field(default_factory=library_versions)
    format_version: int = FORMAT_VERSION

    def save(self, folder: str | os.PathLike) -> None:
        """Write it into `folder`."""
        write_json(Path(folder) / self.CONFIG_FILE, asdict(self))

    @classmethod
    def load(cls, folder: str | os.PathLike) -> Self:
        """Read it from `folder`; `InvalidFilesError` says what is wrong with it, unknown keys are warned of."""
        path = Path(folder) / cls.CONFIG_FILE
        if not path.exists():
            raise NotSavedError(_missing(cls, folder))
        content = read_json(path, strictly=True)
        written = content.get("format_version")
        if isinstance(written, int) and written > FORMAT_VERSION:
            raise InvalidFilesError(
                f"{path}: format_version is {written}, and this hf-deelbo ({version('hf-deelbo')}) reads up to "
                f"{FORMAT_VERSION}. Upgrade it: pip install --upgrade hf-deelbo."
            )
        known = {part.name for part in fields(cls)}
        required = {part.name for part in fields(cls) if part.default is part.default_factory is MISSING}
        if missing := sorted(required - content.keys()):
            raise InvalidFilesError(f"{path}: it has no {missing[0]}. Download or save it again.")
        if unknown := sorted(content.keys() - known):
            logger.warning(f"{path}: ignoring unknown keys {one_line(', '.join(unknown))}.")
        try:
            with blaming(path, leaving=(StrictDataclassError,)):
                return cls(**{name: value for name, value in content.items() if name in known})
        except StrictDataclassError as error:
            reason = one_line(str(error.__cause__ or error))
            raise InvalidFilesError(f"{path}: {reason} Download or save it again.") from error

    def validate_format(self) -> None:
        """Run on construction, as all `validate_...` methods are."""
        if self.format_version < 1:
            raise ValueError(f"format_version: must be at least 1, got {self.format_version}.")
        for name in self.sha256:
            is_known = name.endswith(".safetensors") or name == ADAPTER_CONFIG_FILE
            if name != os.path.basename(name) or not is_known:
                raise ValueError(f"sha256: {name!r} is not the name of a safetensors file in the same folder.")
        if self.TENSORS_FILE not in self.sha256:
            raise ValueError(f"sha256: has no hash of {self.TENSORS_FILE}.")

    def check_files(self, folder: str | os.PathLike) -> None:
        """Compare the hash of each file with the one that was noted when it was saved."""
        for name, expected in self.sha256.items():
            path = Path(folder) / name
            if not path.exists():
                raise InvalidFilesError(f"{path} is missing. Download or save the {self.WHAT} again.")
            check_regular(path)
            if sha256_of(path) != expected:
                raise InvalidFilesError(
                    f"{path}: its hash is not the one in {self.CONFIG_FILE}; it is damaged, or was replaced after the "
                    f"{self.WHAT} was saved. Download or save the {self.WHAT} again."
                )


def save_tensors(tensors: dict[str, torch.Tensor], path: str | os.PathLike) -> None:
    """Write a safetensors file; a `ValueError` names a tensor that is not finite."""
    # but for the error of a J that was measured at one weight sample
    check_finite({n: tensor for n, tensor in tensors.items() if n != "nll_standard_error"}, os.path.basename(path))
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def by_first_word(tensors: Tensors, words: Iterable[str]) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors by the first word of their names, which is taken off; all others under the empty word.

    Example:
        >>> by_first_word({"mean.a.weight": torch.ones(()), "rho": torch.zeros(())}, words=("mean",))
        {'': {'rho': tensor(0.)}, 'mean': {'a.weight': tensor(1.)}}
    """
    parts = {"": {}} | {word: {} for word in words}
    for name, tensor in tensors.items():
        first, _, rest = name.partition(".")
        if first in parts:
            parts[first][rest] = tensor
        else:
            parts[""][name] = tensor
    return parts


def hashes_of(folder: str | os.PathLike) -> dict[str, str]:
    """The SHA-256 of each safetensors file in `folder`, and of the description of adapters."""
    paths = [*Path(folder).glob("*.safetensors"), *Path(folder).glob(ADAPTER_CONFIG_FILE)]
    return {path.name: sha256_of(path) for path in sorted(paths)}


def public_name(name_or_path: str | None) -> str | None:
    """An id on the Hub as it is; `None` for a local folder or an embedded name, which mean nothing to others.

    Example:
        >>> public_name("microsoft/resnet-50")
        'microsoft/resnet-50'
        >>> public_name("/home/me/resnet") is None
        True
    """
    is_id = name_or_path and name_or_path.count("/") == 1 and not name_or_path.startswith((".", "/", "~"))
    return name_or_path if is_id and "\\" not in name_or_path and not os.path.exists(name_or_path) else None


def fetch(
    name_or_path: str | os.PathLike,
    kind: type[SavedConfig],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    only_config: bool = False,
) -> tuple[Path, SavedConfig]:
    """A local folder with the files (`name_or_path` itself, or a snapshot of it on the Hub), and what the JSON says.

    Args:
        name_or_path: a folder, or an id on the Hub.
        kind: what is expected there; its small JSON file is fetched first, so that other repositories are refused
            before they are downloaded.
        revision, token, cache_dir, local_files_only, force_download: as everywhere in `huggingface_hub`.
        only_config: stop after the JSON file.
    """
    if os.path.isdir(name_or_path):
        finish_interrupted(name_or_path)
        return Path(name_or_path), kind.load(name_or_path)
    name = os.fspath(name_or_path)
    options = {
        "revision": revision,
        "token": token,
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
        "force_download": force_download,
    }
    try:
        folder = Path(hf_hub_download(name, kind.CONFIG_FILE, **options)).parent
        config = kind.load(folder)
        if only_config:
            return folder, config
        folder = Path(snapshot_download(name, allow_patterns=list(DOWNLOADED), ignore_patterns=SUBFOLDERS, **options))
        for file in config.sha256:
            if not (folder / file).exists():  # without an answer of the Hub, a snapshot is what the cache has of it
                with suppress(RemoteEntryNotFoundError):
                    hf_hub_download(name, file, **options)
        return folder, config
    except HFValidationError as error:
        raise FileNotFoundError(f"{name!r} is neither a folder nor an id on the Hub such as user/name.") from error
    except LocalEntryNotFoundError as error:
        raise OSError(
            f"{name!r} is not in the cache, and the Hub was not reached or not asked. Check the connection, "
            "`local_files_only` and HF_HUB_OFFLINE, or give a local folder."
        ) from error
    except EntryNotFoundError as error:
        raise NotSavedError(_missing(kind, name)) from error
    except RevisionNotFoundError as error:
        raise OSError(f"{name!r} has no revision {revision!r}; give a branch, a tag or a commit of it.") from error
    except (HTTPError, OSError) as error:
        if _is_refusal(error):
            raise OSError(
                f"{name!r} is not on the Hub, or is private. Check the name; for a private one log in "
                "(`hf auth login`), or pass `token`."
            ) from error
        raise OSError(f"{name!r} could not be downloaded ({_first_line(error)}). Try again.") from error


def push_folder(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    commit_message: str,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    also: dict[str, Path] | None = None,
    run_as_future: bool = False,
) -> CommitInfo | Future[CommitInfo]:
    """Publish a folder as one commit, which is visible whole or not at all.

    Pickles, logs, checkpoints and hidden files are left out; see `UNPUBLISHED`.

    Args:
        folder: what to publish.
        repo_id: `user/name`; made if it is not there.
        commit_message: what it is.
        private: of a new repository; default is that of the user's account.
        token: default is the one of `hf auth login`.
        revision: the branch to commit to; made if it is not there.
        create_pr: open a pull request instead.
        also: further files of the same commit, by their path in the repository.
        run_as_future: return at once.
    """
    _check_base_is_public(Path(folder))
    paths = {path.relative_to(folder).as_posix(): path for path in _published(Path(folder))} | (also or {})
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in sorted(paths.items())]
    api = HfApi(token=token)
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.create_commit(
            repo_id,
            operations,
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
            run_as_future=run_as_future,
        )
    except HFValidationError as error:
        raise ValueError(f"repo_id: {repo_id!r} is no name for a repository ({_first_line(error)}).") from error
    except (HTTPError, OSError, RuntimeError) as error:
        if _is_refusal(error):
            raise PermissionError(
                f"{repo_id!r} could not be pushed to ({_first_line(error)}). Log in with a token that may write there "
                "(`hf auth login`), or pass `token`."
            ) from error
        raise OSError(f"{repo_id!r}: the push failed, nothing was published ({_first_line(error)}).") from error


class Shareable(ABC):
    """What is saved as a folder of files that a `SavedConfig` describes, and shared on the Hub.

    It has the methods of `huggingface_hub.ModelHubMixin` but is none: that one writes file by file into the folder, so
    that a crash leaves a part of them, and reads a file when it is asked for, where hashes want all before the first
    is used.
    """

    config_class: ClassVar[type[SavedConfig]]

    @abstractmethod
    def save_pretrained(self, folder: str | os.PathLike, **kwargs: Any) -> None:
        """Save it into `folder`, whole or not at all."""

    @abstractmethod
    def _write_card(self, folder: str | os.PathLike, repo_id: str | None, **kwargs: Any) -> None:
        """Write the model card, if there is one, of what `save_pretrained` saved with the same `kwargs`."""

    @classmethod
    @abstractmethod
    def _read(cls, folder: Path, config: SavedConfig, **kwargs: Any) -> Self:
        """The inverse of `save_pretrained`."""

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        **kwargs: Any,
    ) -> CommitInfo:
        """Save it with a model card and publish that as one commit of a repository on the Hub.

        Args:
            repo_id: `user/name`; made if it is not there.
            commit_message, private, token, revision, create_pr: as for `hub.push_folder`.
            **kwargs: what `save_pretrained` takes.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, **kwargs)
            self._write_card(folder, public_name(repo_id), **kwargs)
            return push_folder(
                folder,
                repo_id,
                commit_message=commit_message or f"Upload {self.config_class.WHAT}",
                private=private,
                token=token,
                revision=revision,
                create_pr=create_pr,
            )

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        **kwargs: Any,
    ) -> Self:
        """What was saved, from a folder or from the Hub.

        Every file is checked against its hash, every number against the tensors; nothing is unpickled.

        Args:
            name_or_path: a folder, or an id on the Hub.
            revision, token, cache_dir, local_files_only, force_download: as everywhere in `huggingface_hub`.
            **kwargs: `trust_remote_code=True` lets a posterior's model run code that comes with it.
        """
        folder, config = fetch(
            name_or_path,
            cls.config_class,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            force_download=force_download,
        )
        return cls._read(folder, config, **kwargs)


def _check_base_is_public(folder: Path) -> None:
    """Adapters are of no use to those who do not have their base model, and a path of this machine is private."""
    path = folder / ADAPTER_CONFIG_FILE
    if not path.is_file():
        return
    name = read_json(path).get("base_model_name_or_path")
    if not isinstance(name, str) or public_name(name) is None:
        raise ValueError(
            f"{os.fspath(folder)}: its adapters belong to the base model {name!r}, which is not on the Hub. Push that "
            "too, set `model.peft_config['default'].base_model_name_or_path` to its id, and save the adapters again."
        )


def _published(folder: Path) -> Iterable[Path]:
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(fnmatch(part, pattern) for part in parts for pattern in UNPUBLISHED):
            yield path


def _missing(kind: type[SavedConfig], where: str | os.PathLike) -> str:
    return (
        f"{os.fspath(where)!r} has no {kind.CONFIG_FILE}: it is no saved {kind.WHAT}. A plain model is loaded with "
        "transformers' `AutoModel...from_pretrained`."
    )


def _is_refusal(error: Exception) -> bool:
    """No such repository, or none that this token may see or write; the Hub does not always tell which."""
    refused = isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403)
    return refused or isinstance(error, RepositoryNotFoundError)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
