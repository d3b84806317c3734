"""Which page holds which beginning of a text, by its hash, and in what order those go that nobody owns. Pure accounting.

Owned and used by the page pool, which alone knows states and owners. A page is entered once all of its keys and values are
there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from llm_engine.page_hash import PageHash
from serving_core.ids import PageId


@dataclass(frozen=True, slots=True)
class _Entry:
    page_hash: PageHash
    parent: PageHash | None  # of the page before it, None for the first


class PrefixIndex:
    """A forest of pages. Invariants: one page a hash and one hash a page, and with a page the one before it is there too; so
    what is in the index can be found.

    *Idle* pages are those that nobody owns. An owner of a page owns those before it as well, and gives them back after it: so
    the oldest idle page is a leaf, and the ends of texts go before their beginnings. Only where two computed the same page at
    once is it different; then what came after that page goes with it.
    """

    def __init__(self) -> None:
        self._pages: dict[PageHash, PageId] = {}
        self._entries: dict[PageId, _Entry] = {}
        self._children: dict[PageHash, set[PageHash]] = {}
        self._idle: OrderedDict[PageId, None] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, page_id: PageId) -> bool:
        return page_id in self._entries

    def find(self, hashes: Sequence[PageHash]) -> tuple[PageId, ...]:
        """The pages of the first of ``hashes``, as far as they are known without a gap."""
        found: list[PageId] = []
        for page_hash in hashes:
            page_id = self._pages.get(page_hash)
            if page_id is None:
                break
            found.append(page_id)
        return tuple(found)

    def add(self, hashes: Sequence[PageHash], page_ids: Sequence[PageId]) -> None:
        """Enter a text's first pages, all of them from its beginning. For a hash that is known its page stays; the other one is
        a double and gets no entry."""
        parent: PageHash | None = None
        for page_hash, page_id in zip(hashes, page_ids, strict=True):
            if page_hash not in self._pages:
                assert page_id not in self._entries, f"page {page_id} holds something else already"
                self._pages[page_hash] = page_id
                self._entries[page_id] = _Entry(page_hash, parent)
                if parent is not None:
                    self._children.setdefault(parent, set()).add(page_hash)
            parent = page_hash

    def retire(self, page_id: PageId) -> None:
        """Nobody owns the page any more: it is the newest of the idle ones."""
        assert page_id in self._entries
        assert page_id not in self._idle
        self._idle[page_id] = None

    def revive(self, page_id: PageId) -> None:
        """An idle page has an owner again."""
        del self._idle[page_id]

    def evict_oldest(self) -> list[PageId]:
        """Forget the idle page that was used least recently. Returns what was forgotten, see ``forget``."""
        return self.forget(next(iter(self._idle)))

    def forget(self, page_id: PageId) -> list[PageId]:
        """Take a page out, and those that come after it, which could not be found without it; all of them are returned. Nothing
        happens to a page that is not in the index."""
        entry = self._entries.get(page_id)
        if entry is None:
            return []
        if entry.parent is not None:
            siblings = self._children[entry.parent]
            siblings.remove(entry.page_hash)
            if not siblings:
                del self._children[entry.parent]
        forgotten: list[PageId] = []
        hashes = [entry.page_hash]
        while hashes:
            page_hash = hashes.pop()
            hashes.extend(self._children.pop(page_hash, ()))
            gone = self._pages.pop(page_hash)
            del self._entries[gone]
            self._idle.pop(gone, None)
            forgotten.append(gone)
        return forgotten

    def check(self, idle: Sequence[PageId]) -> None:
        """Raises ``AssertionError`` unless the invariants hold and ``idle`` are the idle pages. Walks everything."""
        assert self._idle.keys() == set(idle), f"{len(self._idle)} pages are idle in the index, {len(idle)} are in the pool"
        assert len(self._pages) == len(self._entries), f"{len(self._pages)} hashes for {len(self._entries)} pages"
        children: dict[PageHash, set[PageHash]] = {}
        for page_id, entry in self._entries.items():
            assert self._pages.get(entry.page_hash) == page_id, f"page {page_id} is not what its hash leads to"
            if entry.parent is not None:
                assert entry.parent in self._pages, f"page {page_id} is in the index without the page before it"
                children.setdefault(entry.parent, set()).add(entry.page_hash)
        assert children == self._children, "the index has lost what comes after a page"
        assert self._idle.keys() <= self._entries.keys(), "an idle page is not in the index"
