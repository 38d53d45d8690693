"""A store in a folder of a file system, with a commit that survives a power cut.

Every object is written to a temporary file in its own folder, brought to the disk, given its name by a call
that fails if the name is taken, and then the folder is brought to the disk. So an object is there whole or
not at all, whenever the process or the machine dies. Temporary files that a killed process left are never
shown; `abort_uploads` removes them.

A linked folder is followed when it is named; a linked object is never read (nobody wrote one), and `list`
does not descend into links. A folder whose last object was deleted is removed with it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from spotsafe.errors import (
    StorageError,
    StorageExists,
    StorageLinked,
    StorageNotFolder,
    StorageNotFound,
    StorageShort,
    StorageUnavailable,
)
from spotsafe.storage.failures import too_large, translated
from spotsafe.storage.listing import bounded
from spotsafe.storage.paths import check_folder, check_path, is_temporary, temporary_name
from spotsafe.storage.placing import place_new
from spotsafe.storage.store import Entry
from spotsafe.storage.writing import (
    CHUNK,
    DIRECT_FROM,
    flat,
    is_page_aligned,
    open_new,
    sync_folder,
    window,
    write_aligned,
    write_all,
)

# How often a write begins again because somebody removed the empty folder that it had just made.
_FOLDER_TRIES = 16
# How often `create` looks again after the object that was in its way vanished.
_CREATE_TRIES = 5


class LocalStore:
    """Objects are files below a folder. Nothing is made before the first write.

    Where neither `link` nor `renameat2` is offered (some shares and user-space file systems), `put` and
    `put_large` look and rename, and `create` also reads back: it returns true only if its own bytes are
    there, but a second writer at the same instant may replace them later. A claim has to check again (rule 12
    of the design).

    Args:
        root: the run's folder; a leading ``~`` is expanded. It need not exist.

    Raises:
        StorageNotFolder: `root` is a file or lies below one.
        StorageRefused: `root` cannot be looked at with the permissions at hand.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        text = os.fspath(root)
        if not text:
            raise ValueError("the run's folder must not be empty; give a path, '.' for the current folder")
        self._root = os.path.abspath(os.path.expanduser(text))
        self._synced: set[str] = set()
        """Folders whose own names this store has brought to the disk."""
        self._exclusive: bool | None = None
        _check_root(self._root)

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    @property
    def url(self) -> str:
        """The absolute path of the folder."""
        return self._root

    @property
    def exclusive(self) -> bool | None:
        """Whether `create` is atomic on this file system; None before it has created anything."""
        return self._exclusive

    @property
    def in_place(self) -> bool:
        """Reading needs no request."""
        return True

    # -- writing

    def put(self, path: str, data: bytes) -> None:
        """Write a small object under a new name, durably.

        Raises:
            StorageExists: the name is taken; the object there was left as it is.
            StorageError: see `spotsafe.storage.failures`.
        """
        self._commit(path, memoryview(data), place=place_new)

    def put_large(self, path: str, data: memoryview) -> None:
        """Write an object of any size under a new name, durably.

        Page-aligned memory goes to the disk without a copy, where the file system allows it.

        Raises:
            StorageExists: the name is taken; the object there was left as it is.
            StorageError: see `spotsafe.storage.failures`.
        """
        data = flat(data)
        direct = len(data) >= DIRECT_FROM and is_page_aligned(data)
        self._commit(path, data, place=place_new, direct=direct)

    def create(self, path: str, data: bytes) -> bool:
        """Create a small object if there is none; true if the object there now is this one.

        Raises:
            StorageExists: there is a folder of that name.
            StorageUnavailable: what was in the way kept vanishing.
            StorageError: see `spotsafe.storage.failures`.
        """
        for _ in range(_CREATE_TRIES):
            try:
                self._exclusive = self._commit(path, memoryview(data), place=place_new)
                if self._exclusive:
                    return True
            except StorageExists:
                if os.path.isdir(self._full(path)):
                    raise
            with suppress(StorageNotFound):
                return self._holds(path, data)
        raise StorageUnavailable(
            f"cannot create {self._full(path)}: it keeps appearing and vanishing; "
            "is another program cleaning up?",
            path=path,
        )

    def replace(self, path: str, data: bytes) -> None:
        """Write a small object, over an older one if there is one, at once or not at all, durably."""
        self._commit(path, memoryview(data), place=_rename_over)

    def delete(self, path: str) -> None:
        """Delete an object, and the folders that are empty then; one that is not there is no error."""
        final = self._inside(check_path(path))
        with translated("delete", path=path, where=final):
            with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                os.unlink(final)
            self._tidy(os.path.dirname(final))

    def begun(self, folder: str) -> list[str]:
        """Paths of the temporary files below `folder`, of writes that go on or never ended."""
        start = self._inside_folder(folder)
        with translated("list", path=folder, where=start):
            found = [entry.path for entry in _walk(start) if is_temporary(entry.name)]
        return sorted(os.path.relpath(path, self._root) for path in found)

    def abort_uploads(self, folder: str) -> None:
        """Remove the temporary files below `folder` of writes that never ended, whoever began them."""
        start = self._inside_folder(folder)
        with translated("clean up", path=folder, where=start):
            for entry in list(_walk(start)):
                if is_temporary(entry.name):
                    with suppress(FileNotFoundError):
                        os.unlink(entry.path)
                    self._tidy(os.path.dirname(entry.path))

    # -- reading

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """The whole object.

        Raises:
            StorageNotFound: there is none.
            StorageError: it is larger than `max_bytes`, is a link, or could not be read.
        """
        with self._opened(path) as fd:
            data = bytearray()
            while piece := os.read(fd, min(CHUNK, max_bytes + 1 - len(data))):
                data += piece
                if len(data) > max_bytes:
                    raise too_large(self._full(path), path=path, max_bytes=max_bytes)
            return bytes(data)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the object's bytes from `offset` (bytes) on.

        Raises:
            StorageNotFound: there is none.
            StorageShort: it ends before the buffer is full.
        """
        view = window(offset, buffer)
        done = 0
        with self._opened(path) as fd:
            while done < len(view):
                count = os.preadv(fd, [view[done:]], offset + done)
                if count == 0:
                    raise StorageShort(
                        f"{self._full(path)} ends at byte {offset + done}, "
                        f"before the {len(view)} bytes from {offset} on that were asked for",
                        path=path,
                    )
                done += count

    def size(self, path: str) -> int:
        """Size of an object in bytes.

        Raises:
            StorageNotFound: there is none.
        """
        final = self._inside(check_path(path))
        with translated("look at", path=path, where=final):
            found = os.lstat(final)
            self._check_regular(found.st_mode, path)
            return found.st_size

    def names(self, folder: str) -> list[str]:
        """Base names of what lies directly in a folder, sorted; empty if there is no such folder."""
        start = self._inside_folder(folder)
        with translated("list", path=folder, where=start):
            try:
                with os.scandir(start) as entries:
                    found = bounded((entry.name for entry in entries), where=start, path=folder)
                    return sorted(name for name in found if not is_temporary(name))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def list(self, folder: str) -> list[Entry]:
        """All objects below a folder, sorted by path; empty if there is no such folder."""
        start = self._inside_folder(folder)
        found = []
        with translated("list", path=folder, where=start):
            for entry in _walk(start):
                if not is_temporary(entry.name):
                    with suppress(FileNotFoundError):
                        size = entry.stat(follow_symlinks=False).st_size
                        found.append(Entry(os.path.relpath(entry.path, self._root), size))
        return sorted(found)

    # -- inside

    def _inside(self, path: str) -> str:
        """The path on this machine of what lies in the run, after a look that no folder leads out of it."""
        if not path:
            return self._root
        at = self._root
        for part in path.split("/")[:-1]:
            at = os.path.join(at, part)
            if os.path.islink(at):
                self._refuse_link(os.path.relpath(at, self._root))
        return os.path.join(at, path.rpartition("/")[2])

    def _inside_folder(self, folder: str) -> str:
        start = self._inside(check_folder(folder))
        if folder and os.path.islink(start):
            self._refuse_link(folder)
        return start

    def _full(self, path: str) -> str:
        return os.path.join(self._root, path) if path else self._root

    def _commit(
        self, path: str, data: memoryview, *, place: Callable[[str, str], bool], direct: bool = False
    ) -> bool:
        """Bring `data` to the disk under `path`; what `place` says about other writers.

        Every way out removes the temporary file. A name that was taken is brought to the disk too, because it
        may be our own of an earlier try that failed at its last step.
        """
        final = self._inside(check_path(path))
        folder = os.path.dirname(final)
        with translated("write", path=path, where=final, missing=StorageError):
            temporary, fd = self._open_temporary(folder, direct=direct)
            try:
                try:
                    (write_aligned if direct else write_all)(fd, data)
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
                exclusive = place(temporary, final)
            except FileExistsError as cause:
                sync_folder(folder)
                raise StorageExists(f"{final} exists already and was left as it is", path=path) from cause
            finally:
                with suppress(OSError):
                    os.unlink(temporary)
            sync_folder(folder)
            return exclusive

    def _open_temporary(self, folder: str, *, direct: bool) -> tuple[str, int]:
        """A new temporary file in `folder`, which is made if it is missing; its path and its descriptor."""
        for remaining in reversed(range(_FOLDER_TRIES)):
            temporary = os.path.join(folder, temporary_name())
            try:
                self._make_folder(folder)
                return temporary, open_new(temporary, direct=direct)
            except FileNotFoundError:
                # Another writer deleted the last object of the folder, and the folder with it.
                self._synced.clear()
                if not remaining:
                    raise
        raise AssertionError("unreachable")

    def _make_folder(self, folder: str) -> None:
        """Make a folder and its missing parents, and bring their names to the disk.

        Inside the run the name is brought to the disk even if somebody else made the folder: that one may not
        have done so yet. Above the run only what was made here is ours to sync.
        """
        if folder in self._synced:
            return
        parent = os.path.dirname(folder)
        inside = self._is_inside(folder)
        if inside or not os.path.isdir(parent):
            self._make_folder(parent)
        made = False
        if not os.path.isdir(folder):
            with suppress(FileExistsError):
                os.mkdir(folder)
                made = True
        if made or inside:
            sync_folder(parent)
        self._synced.add(folder)

    def _is_inside(self, folder: str) -> bool:
        return folder != self._root and folder.startswith(os.path.join(self._root, ""))

    def _tidy(self, folder: str) -> None:
        """Bring a deletion to the disk, and remove the folders that are empty now.

        Deletions are ordered (a manifest before its files), so the order must survive a power cut.
        """
        with suppress(FileNotFoundError, NotADirectoryError):
            sync_folder(folder)
        while self._is_inside(folder):
            try:
                os.rmdir(folder)
            except OSError:
                return
            self._synced.discard(folder)
            folder = os.path.dirname(folder)

    @contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        """Descriptor of an object, for reading. Not blocking: a pipe of that name must not hang the run."""
        final = self._inside(check_path(path))
        with translated("read", path=path, where=final):
            if os.path.islink(final):
                self._refuse_link(path)
            fd = os.open(final, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                self._check_regular(os.fstat(fd).st_mode, path)
                yield fd
            finally:
                os.close(fd)

    def _check_regular(self, mode: int, path: str) -> None:
        if stat.S_ISREG(mode):
            return
        if stat.S_ISLNK(mode):
            self._refuse_link(path)
        if stat.S_ISDIR(mode):
            raise StorageNotFound(f"{self._full(path)} is a folder, not an object", path=path)
        raise StorageError(f"{self._full(path)} is no regular file; remove it", path=path)

    def _refuse_link(self, path: str) -> NoReturn:
        raise StorageLinked(
            f"{self._full(path)} is a symbolic link, which is not followed; put what it points to there",
            path=path,
        )

    def _holds(self, path: str, data: bytes) -> bool:
        return self.size(path) == len(data) and self.read(path, max_bytes=len(data)) == data


def _check_root(root: str) -> None:
    with translated("look at", path=root, where=root):
        try:
            mode = os.stat(root).st_mode
        except FileNotFoundError:
            return
        except NotADirectoryError as cause:
            raise StorageNotFolder(
                f"{root} lies below a file; give a path whose parents are folders", path=root
            ) from cause
    if not stat.S_ISDIR(mode):
        raise StorageNotFolder(f"{root} is a file, not a folder; give the path of a folder", path=root)


def _rename_over(temporary: str, final: str) -> bool:
    os.rename(temporary, final)
    return True


def _walk(folder: str) -> Iterator[os.DirEntry[str]]:
    """Everything below a folder that is no folder. What vanishes while we look is not there."""
    pending, seen = [folder], 0
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                found = list(bounded(entries, where=folder, path="", before=seen))
        except (FileNotFoundError, NotADirectoryError):
            continue
        seen += len(found)
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
            else:
                yield entry
