"""The file store against a model: owners come, renew, leave and die, the folder is wiped, a reader looks now and then.

One thing a store without a server cannot tell: what was changed and wiped before anybody looked. Readers look within
milliseconds, so here too they look before and after a wipe.
"""

import os
import shutil
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from headwater.protocol.cluster import CatalogueEntry, Instance
from headwater.runtime.registry.base import InstanceGone, InstancePut, ModelGone, ModelPut, RegistryEvent
from headwater.runtime.registry.catalogue import Catalogue
from headwater.runtime.registry.conformance import example_card, example_instance
from headwater.runtime.registry.feed import Feed
from headwater.runtime.registry.folder import Claim, Folder, Held
from headwater.runtime.registry.records import encode_instance
from headwater.runtime.registry.scanner import Scanner

WORKERS = ("w1", "w2", "w3")
MODELS = ("m1", "m2")


def instance(worker_id: str, version: int) -> Instance:
    return example_instance(worker_id, kv_blocks=version)


class Store(RuleBasedStateMachine):
    """Two writers of the catalogue, any number of owners, one reader."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="hw-store-"))
        self.folder = Folder(self.root / "r")
        self.folder.ensure()
        self.claims: dict[str, Claim] = {}
        self.versions: dict[str, int] = {}
        self.catalogues = [Catalogue(self.folder), Catalogue(self.folder)]
        self.models: dict[str, CatalogueEntry] = {}
        self.scanner = Scanner(self.folder)
        self.reader = Catalogue(self.folder)
        self.seen = Feed()
        self.wiped = False

    def teardown(self) -> None:
        try:
            self.mend()
            self.look()
            assert self.seen.instances == {w: instance(w, self.versions[w]) for w in self.claims}
            assert self.seen.models == self.models
        finally:
            self.scanner.close()
            for claim in self.claims.values():
                os.close(claim.fd)
            shutil.rmtree(self.root)

    # Owners

    @rule(worker=st.sampled_from(WORKERS))
    def register(self, worker: str) -> None:
        data = encode_instance(instance(worker, 0))
        if worker in self.claims and not self.wiped:
            with pytest.raises(Held):
                self.folder.claim(worker, data)
        elif worker not in self.claims:
            self.claims[worker] = self.folder.claim(worker, data)
            self.versions[worker] = 0

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.claims)))
        self.versions[worker] += 1
        self.folder.replace(self.claims[worker], encode_instance(instance(worker, self.versions[worker])))

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), politely=st.booleans())
    def end(self, data: st.DataObject, politely: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.claims)))
        claim = self.claims.pop(worker)
        if politely:
            self.folder.drop(claim)
        else:
            os.close(claim.fd)

    # Models

    @rule(writer=st.integers(0, 1), name=st.sampled_from(MODELS), length=st.integers(1, 3))
    def put_model(self, writer: int, name: str, length: int) -> None:
        if self.wiped:
            return
        entry = CatalogueEntry(name, msgspec.structs.replace(example_card(name), max_model_len=length))
        self.catalogues[writer].change(lambda models: models | {name: entry})
        self.models[name] = entry

    @rule(writer=st.integers(0, 1), name=st.sampled_from(MODELS))
    def remove_model(self, writer: int, name: str) -> None:
        if self.wiped:
            return
        self.catalogues[writer].change(lambda models: {k: v for k, v in models.items() if k != name})
        self.models.pop(name, None)

    # The store

    @rule(partly=st.booleans())
    def wipe(self, partly: bool) -> None:
        self.look()
        for catalogue in (*self.catalogues, self.reader):
            self.seen_by(catalogue)
        shutil.rmtree(self.folder.instances if partly else self.folder.path, ignore_errors=True)
        self.wiped = True

    @rule()
    def mend(self) -> None:
        """What every keeper does."""
        self.folder.ensure()
        for claim in self.claims.values():
            if not self.folder.holds(claim):
                self.folder.replace(claim, claim.data)
        self.wiped = False
        for catalogue in (*self.catalogues, self.reader):
            self.seen_by(catalogue)

    @rule()
    def clean(self) -> None:
        self.folder.remove_dead()

    # The reader

    @rule()
    def look(self) -> None:
        if not self.folder.instances.is_dir():
            return
        events = self.scanner.look()
        self.seen.apply(events)
        self.check(events)
        self.seen_by(self.reader)
        alive = {worker: instance(worker, self.versions[worker]) for worker in self.claims}
        assert self.seen.instances.keys() - alive.keys() == set(), "dead, but not noticed"
        if not self.wiped:
            assert self.seen.instances == alive

    def seen_by(self, catalogue: Catalogue) -> None:
        events = catalogue.look(mend=not self.wiped)
        if catalogue is self.reader:
            self.seen.apply(events)
            self.check(events)

    def check(self, events: list[RegistryEvent]) -> None:
        for event in events:
            if isinstance(event, InstanceGone):
                assert event.worker_id not in self.claims, "alive, but reported gone"
            elif isinstance(event, InstancePut):
                assert event.instance.worker_id in self.claims
            elif isinstance(event, ModelGone):
                assert event.name not in self.models, "a wiped model was reported as removed"
            elif isinstance(event, ModelPut):
                assert event.entry.name in self.models


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
