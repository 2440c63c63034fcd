"""From checks to verdicts, with their reasons and advice."""

from __future__ import annotations

from typing import Any

import pytest
from support.internals import Mount

from fscoord.doctor.verdict import (
    BAD,
    HOSTS,
    INFO,
    NOT_PROVEN,
    NOT_SAFE,
    OK,
    PROCESSES,
    SAFE,
    UNKNOWN,
    Check,
    Findings,
    judge,
)

NEEDED = ("race", "freshness-locked", "delay-locked", "freshness-direct", "delay-direct", "names", "store")
KINDS = ("ofd", "flock", "soft")


def facts(kind: str = "nfs4", *options: str) -> dict[str, Any]:
    mount = Mount(kind, "/mnt", ("rw", *options))
    return {
        "path": "/mnt/x",
        "kind": kind,
        "point": "/mnt",
        "is_local": mount.is_local,
        "coherence": mount.coherence,
        "caution": mount.caution,
        "objections": {lock: mount.objection(lock) for lock in KINDS},
    }


def checks(*scopes: str, **outcomes: str) -> list[Check]:
    """All checks between `scopes`, as passed but those in `outcomes` (``exclusion_ofd=BAD``)."""
    found = []
    for between in scopes:
        for kind in KINDS:
            found.append(Check("exclusion", between, outcomes.get(f"exclusion_{kind}", OK), "says", kind))
            found.append(Check("death", between, outcomes.get(f"death_{kind}", OK), "says", kind))
        for name in NEEDED:
            outcome = outcomes.get(name.replace("-", "_"), OK)
            found.append(Check(name, between, outcome, f"{name} says", "ofd" if name in {"race", "store"} else ""))
    return found


def verdict(mount: dict[str, Any], found: list[Check], other: str | None = "b", **more: Any) -> dict[str, Any]:
    return judge(Findings(mount, found, more.pop("lock", "ofd"), other, **more))


BOTH = (PROCESSES, HOSTS)


def test_local_file_system_is_safe_when_two_processes_proved_it():
    judged = verdict(facts("ext4"), checks(PROCESSES), None)
    assert judged["verdict"] == SAFE
    assert "two processes of this host" in judged["reasons"][0]


def test_network_mount_is_safe_only_when_two_hosts_proved_it():
    assert verdict(facts(), checks(*BOTH))["verdict"] == SAFE
    judged = verdict(facts(), checks(PROCESSES), None)
    assert judged["verdict"] == NOT_PROVEN
    assert any("srun -N2 fscoord doctor /mnt/x" in each for each in judged["recommendations"])


@pytest.mark.parametrize("kind", ["lustre", "gpfs", "beegfs", "ceph", "fuse.unheard-of"])
def test_shared_file_system_is_never_proven_by_one_host(kind):
    judged = verdict(facts(kind, "flock"), checks(PROCESSES), None)
    assert judged["verdict"] == NOT_PROVEN


@pytest.mark.parametrize("name", ["exclusion_ofd", "death_ofd", *(name.replace("-", "_") for name in NEEDED)])
@pytest.mark.parametrize("scopes", [(PROCESSES,), (HOSTS,)], ids=["processes", "hosts"])
def test_check_that_is_bad_makes_it_unsafe_and_one_unknown_leaves_it_open(name, scopes):
    rest = [scope for scope in BOTH if scope not in scopes]
    bad = verdict(facts(), [*checks(*scopes, **{name: BAD}), *checks(*rest)])
    assert bad["verdict"] == NOT_SAFE
    assert any(f"between {scopes[0]}" in reason for reason in bad["reasons"])
    assert verdict(facts(), [*checks(*scopes, **{name: UNKNOWN}), *checks(*rest)])["verdict"] == NOT_PROVEN


@pytest.mark.parametrize("name", ["exclusion", "death", *NEEDED])
def test_check_that_is_missing_leaves_the_verdict_open(name):
    found = [check for check in checks(*BOTH) if (check.name, check.between) != (name, HOSTS)]
    judged = verdict(facts(), found)
    assert judged["verdict"] == NOT_PROVEN
    assert name in judged["reasons"][0]


def test_host_that_went_away_is_the_first_reason():
    gone = Check("presence", HOSTS, UNKNOWN, "host b does not answer any more")
    judged = verdict(facts(), [*checks(PROCESSES), gone])
    assert (judged["verdict"], judged["reasons"][0]) == (NOT_PROVEN, "between hosts: host b does not answer any more")


def test_direct_reads_count_only_where_a_store_relies_on_them():
    found = checks(*BOTH, freshness_direct=UNKNOWN, delay_direct=UNKNOWN)
    assert verdict(facts("gpfs"), found)["verdict"] == SAFE
    assert verdict(facts("lustre", "flock"), found)["verdict"] == NOT_PROVEN
    assert verdict(facts("nfs4"), found)["verdict"] == NOT_PROVEN


@pytest.mark.parametrize("kind", ["lustre", "nfs4"])
def test_mount_that_refuses_direct_reads_is_judged_by_the_reads_under_a_lock(kind):
    """A store reads under the lock there, and so the advice names that mode."""
    judged = verdict(facts(kind, "flock"), checks(*BOTH, freshness_direct=INFO, delay_direct=INFO))
    assert judged["verdict"] == SAFE
    assert 'coherence="locked"' in " ".join(judged["recommendations"])
    judged = verdict(facts(kind, "flock"), checks(*BOTH))
    assert 'coherence="direct"' in " ".join(judged["recommendations"])


def test_lock_kind_not_in_use_may_fail_and_one_that_works_is_advised():
    assert verdict(facts(), checks(*BOTH, exclusion_flock=BAD))["verdict"] == SAFE
    judged = verdict(facts(), checks(*BOTH, exclusion_ofd=BAD))
    assert judged["verdict"] == NOT_SAFE
    assert any('lock="flock"' in each and "--lock flock" in each for each in judged["recommendations"])


def test_marker_files_are_advised_only_where_there_are_no_locks():
    lying = verdict(facts(), checks(*BOTH, exclusion_ofd=BAD, exclusion_flock=BAD))
    assert 'lock="soft"' not in " ".join(lying["recommendations"])
    found = [
        each._replace(outcome=BAD, measured={"missing": True}) if each.lock in {"ofd", "flock"} else each
        for each in checks(PROCESSES)
    ]
    assert 'lock="soft"' in " ".join(verdict(facts("ext4"), found, None)["recommendations"])


@pytest.mark.parametrize(
    ("mount", "remedy"),
    [
        (facts("nfs", "vers=3", "local_lock=all"), "local_lock=none"),
        (facts("nfs", "vers=3", "nolock"), "without nolock"),
        (facts("fuse.sshfs"), "another shared directory"),
        (facts("lustre", "localflock"), "flock"),
    ],
)
def test_mount_whose_locks_are_known_to_lie_is_not_safe_and_gets_a_remedy(mount, remedy):
    for found, other in ((checks(*BOTH), "b"), (checks(PROCESSES), None), ([], None)):
        judged = verdict(mount, found, other)
        assert judged["verdict"] == NOT_SAFE
        assert remedy in " ".join(judged["recommendations"])


def test_kernel_that_takes_lost_locks_back_is_not_safe(monkeypatch):
    monkeypatch.setattr("fscoord._runtime.system.nfs_recovers_lost_locks", lambda: True)
    judged = verdict(facts("nfs4", "vers=4.2"), checks(*BOTH))
    assert judged["verdict"] == NOT_SAFE
    assert "recover_lost_locks" in " ".join(judged["reasons"] + judged["recommendations"])


def test_glusterfs_that_passes_all_is_not_proven_as_its_options_are_not_seen():
    judged = verdict(facts("fuse.glusterfs"), checks(*BOTH))
    assert judged["verdict"] == NOT_PROVEN
    assert "direct-io-mode=enable" in judged["reasons"][0]
    assert verdict(facts("fuse.glusterfs"), checks(*BOTH, race=BAD))["verdict"] == NOT_SAFE


def test_beegfs_whose_option_cannot_be_seen_is_proven_by_two_hosts():
    assert verdict(facts("beegfs"), checks(*BOTH))["verdict"] == SAFE
    assert "tuneUseGlobalFileLocks" in " ".join(verdict(facts("beegfs"), checks(PROCESSES), None)["reasons"])


def test_lock_manager_that_is_silent_gets_its_hint():
    found = checks(PROCESSES)
    found[0] = Check("exclusion", PROCESSES, BAD, "no answer", "ofd", {"stuck": True})
    judged = verdict(facts("nfs", "vers=3"), found, None)
    assert judged["verdict"] == NOT_SAFE
    assert all(word in " ".join(judged["recommendations"]) for word in ("rpc.statd", "lockd", "nolock"))
    assert "lock service" in " ".join(verdict(facts("lustre", "flock"), found, None)["recommendations"])


def test_nfs_without_locks_gets_advice_on_its_lock_manager():
    found = checks(PROCESSES)
    found[0] = Check("exclusion", PROCESSES, BAD, "the mount has no locks of this kind", "ofd", {"missing": True})
    assert "rpc.statd" in " ".join(verdict(facts("nfs", "vers=3"), found, None)["recommendations"])
    assert "rpc.statd" not in " ".join(verdict(facts("lustre", "flock"), found, None)["recommendations"])


def test_nfs_without_symbolic_links_gets_no_advice_on_its_lock_manager():
    found = [
        each._replace(outcome=BAD, measured={"missing": True}) if each.lock == "soft" else each
        for each in checks(*BOTH)
    ]
    judged = verdict(facts("nfs", "vers=3"), found)
    assert judged["verdict"] == SAFE
    assert "rpc.statd" not in " ".join(judged["recommendations"])


def test_instances_that_did_not_come_are_missed():
    local = verdict(facts("ext4"), checks(PROCESSES), None, expected=2, came=1)
    assert local["verdict"] == NOT_SAFE
    assert "belongs to one host" in local["reasons"][0]
    assert verdict(facts(), checks(*BOTH), expected=3, came=2)["verdict"] == NOT_PROVEN
    assert verdict(facts("ext4"), checks(PROCESSES), None, expected=2, came=2)["verdict"] == SAFE


def test_unknown_file_system_is_not_proven():
    assert verdict(facts(""), checks(PROCESSES), None)["verdict"] == NOT_PROVEN


def test_soft_lock_is_judged_by_its_own_promises():
    found = [check for check in checks(*BOTH) if not (check.name == "death" and check.lock == "soft")]
    found += [Check(name, scope, OK, "says", "soft") for name in ("race", "store") for scope in BOTH]
    assert verdict(facts("lustre"), found, lock="soft")["verdict"] == SAFE
