"""Results of a long search in a JSON file, from which a killed search goes on."""

import json
from pathlib import Path
from typing import Any

from .files import write_whole


class ResultsFile:
    """A JSON file that is always whole and belongs to one search.

    Args:
        path: where it is.
        search: what is searched; a file of another search is refused.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> file = ResultsFile(Path(folder.name) / "results.json", {"rates": [0.1, 0.01]})
        >>> file.read()
        {}
        >>> file.write({"trials": [1.5]})
        >>> file.read()
        {'rates': [0.1, 0.01], 'trials': [1.5]}
        >>> folder.cleanup()
    """

    def __init__(self, path: Path, search: dict[str, Any]):
        self.path = path
        self.search = json.loads(json.dumps(search))  # as it will be read: tuples become lists

    def read(self) -> dict[str, Any]:
        """The search and its results; nothing if there is no file yet."""
        if not self.path.exists():
            return {}
        content = json.loads(self.path.read_text())
        different = sorted(name for name, value in self.search.items() if content.get(name) != value)
        if different:
            raise ValueError(
                f"folder: {self.path.parent} holds another search (it differs in: {', '.join(different)}). Choose "
                "another folder, or remove it."
            )
        return content

    def write(self, results: dict[str, Any]) -> None:
        """Replace the file at once: whoever is killed here leaves the old file or the new one, never a part."""
        write_whole(self.path, json.dumps(self.search | results, indent=2))  # -Infinity is read back by Python
