"""Small files that come with the package: the quick start's policy, a dozen word problems."""

from pathlib import Path


def asset(name: str) -> str:
    """Path of a shipped file or folder.

    Raises:
        FileNotFoundError: there is none of that name; the message lists those there are.
    """
    folder = Path(__file__).parent
    path = folder / name
    if not path.exists():
        known = sorted(p.name for p in folder.iterdir() if not p.name.startswith("_"))
        raise FileNotFoundError(f"no asset {name!r}; there are {known}")
    return str(path)
