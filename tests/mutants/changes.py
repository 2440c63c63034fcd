"""Mistakes that a log like this one invites: each a change of one place in the source, and the tests that find it."""

from __future__ import annotations

from typing import NamedTuple

SCHEDULES = "tests/simulation/test_schedules.py"
FLIPS = "tests/faults/test_flips.py::test_bit_flipped_anywhere_in_a_log_is_damage_or_changes_nothing"
MOVED = "tests/faults/test_moved_logs.py"
MEETINGS = f"{SCHEDULES}::test_barrier_is_passed_on_any_schedule_when_all_have_come"
ARRIVALS = "tests/unit/test_arrivals.py"
EVENTS = "tests/unit/test_file_events.py"
KERNEL_WAIT = "tests/unit/test_kernel_wait.py"
POLLER = "tests/unit/test_node_poller.py"
WAITER = "tests/unit/test_waiter.py"
NETWORK = "tests/unit/test_network_access.py"
ARRIVAL_FAULTS = "tests/faults/test_arrival_faults.py"
ARRIVAL_SCHEDULES = "tests/unit/test_arrival_schedules.py"
ARRIVAL_SLOTS = "tests/faults/test_arrival_slots.py"
SPARE = "tests/unit/test_spare_waiter.py"
NODES = f"{SCHEDULES}::test_combined_calls_of_two_hosts_are_linearizable_on_any_schedule"
COMBINER = "tests/unit/test_combiner.py"
DOORBELL = "tests/unit/test_doorbell.py"
BELL_SCHEDULES = "tests/unit/test_bell_schedules.py"
COMBINED_INTERRUPTS = "tests/faults/test_combined_interrupts.py"
FOREIGN = "tests/faults/test_foreign_exceptions.py"
OPERATIONS = "tests/unit/test_operations.py"
TRANSACTIONS = "tests/contract/test_transactions.py"
LEFTOVERS = "tests/faults/test_leftover_keys.py"
EXTENT = "tests/unit/test_shared_extent.py"
SIGNALS = "tests/unit/test_signals.py"


class Mutant(NamedTuple):
    """A mistake: in the definition `where`, `old`, which stands there once, becomes `new`; one of `tests` must fail.

    Attributes:
        where: the qualified name of a function, a class, or an assignment, such as ``Log.update``; what
            `definitions.locate` takes. A definition that moves to another module needs no change here.
    """

    name: str
    where: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "an author whose request can't be withdrawn writes alone, and a later leader writes it again",
        "Combiner._withdraw",
        "            raise StoreUnavailableError(\n",
        "            write.is_claimed = True\n            return False\n            raise StoreUnavailableError(\n",
        (f"{COMBINER}::test_request_that_can_not_be_withdrawn_may_still_be_applied",),
    ),
    Mutant(
        "a handler that a Ctrl-C leaves in place goes on deferring signals, which nothing sends any more",
        "signals._handling",
        "before[number] if is_over else handler",
        "handler",
        (f"{SIGNALS}::test_signal_after_an_interrupted_end_of_a_deferral_is_not_lost",),
    ),
    Mutant(
        "the exception of the first deferred signal loses the second one",
        "signals.defer_signals",
        "        receive()\n",
        "        for number in deferred:\n            signal.raise_signal(number)\n",
        (f"{SIGNALS}::test_deferred_signals_are_both_handled_at_the_end",),
    ),
    Mutant(
        "an interrupted candidate keeps a descriptor, and stays out of all later elections",
        "PollerElection._acquire",
        "                    safe_files.close_owned(fd, self._requested)\n",
        "                    pass\n",
        ("tests/unit/test_node_poller.py::test_interrupted_candidate_can_still_become_the_poller",),
    ),
    Mutant(
        "a waiter believes a torn extent",
        "shared.extent.read",
        " or crc32(found[4:end]) != checksum",
        "",
        (f"{EXTENT}::test_extent_that_is_torn_is_not_read",),
    ),
    Mutant(
        "a poller that has read less replaces the extent of a leader",
        "shared.extent.publish",
        " and start + size >= extent.end",
        " and False",
        (f"{EXTENT}::test_extent_that_goes_further_stays",),
    ),
    Mutant(
        "a waiter reads the extent of another generation",
        "NetworkAccess.read_extent",
        " or extent.file != self._file",
        "",
        (f"{EXTENT}::test_extent_without_new_bytes_is_not_applied",),
    ),
    Mutant(
        "a waiter reads an extent that begins after its position",
        "NetworkAccess.read_extent",
        "not 0 <= done < len(extent.data)",
        "not done < len(extent.data)",
        (f"{EXTENT}::test_extent_without_new_bytes_is_not_applied",),
    ),
    Mutant(
        "a record that is not complete gets into the extent",
        "NetworkAccess._advance",
        "is_at_record and handle.offset == start + len(data)",
        "is_at_record",
        (f"{EXTENT}::test_handle_does_not_keep_a_record_that_is_not_complete",),
    ),
    Mutant(
        "a void gets into the extent, at the offset of the torn record",
        "NetworkAccess.write",
        "if handle.pending or handle.is_torn:",
        "if False:",
        (f"{EXTENT}::test_handle_does_not_keep_a_void_at_the_offset_of_the_torn_record",),
    ),
    Mutant(
        "a rank that only meets others at barriers does not keep its byte",
        "NetworkAccess.read_extent",
        "        self._liveness.check_byte(system.time.monotonic())\n",
        "",
        (f"{EXTENT}::test_handle_that_only_reads_extents_keeps_its_byte",),
    ),
    Mutant(
        "a look before a sleep takes the extent for the whole log",
        "FileWait.look",
        "reads=reads",
        "reads=not notifier.passes_on_changes",
        (f"{EXTENT}::test_waiter_that_does_not_find_its_key_in_the_extent_reads_on_the_server",),
    ),
    Mutant(
        "a writer rings before the extent is there",
        "ChangeNotifier._ring_node",
        "                shared_extent.publish(bell, extent)\n",
        "                pass\n",
        (f"{EXTENT}::test_waiter_that_is_rung_reads_in_the_extent_and_not_on_the_server",),
    ),
    Mutant(
        "the poller rings for what it has read, and does not publish it",
        "PollerElection.notify",
        "        if armed and extent is not None:\n            shared_extent.publish(self._bell, extent)\n",
        "",
        (f"{EXTENT}::test_poller_publishes_what_it_has_read_of_another_host",),
    ),
    Mutant(
        "an error of the removal, after the write, fails the call of a leader",
        "Station.sweep_if_due",
        "            with ignoring(OSError):\n                self._sweep(slot, now)\n",
        "            self._sweep(slot, now)\n",
        (f"{COMBINER}::test_leader_whose_files_of_the_host_fail_after_the_write_has_written_once",),
    ),
    Mutant(
        "a file that another thread is opening stays open in a child",
        "_close_inherited",
        "    if opens_under_way:\n        _close_unfinished_opens()\n",
        "",
        ("tests/faults/test_fork.py::test_file_that_another_thread_is_opening_is_closed_in_a_child",),
    ),
    Mutant(
        "a child closes the program's own descriptor of a file that another thread was opening",
        "_close_unfinished_opens",
        " & flags == flags",
        " >= 0",
        ("tests/faults/test_fork.py::test_file_that_another_thread_is_opening_is_closed_in_a_child",),
    ),
    Mutant(
        "a transaction deletes no key",
        "KeyValueState.apply",
        "                        self._delete(name)\n",
        "                        pass\n",
        (TRANSACTIONS,),
    ),
    Mutant(
        "a transaction compares nothing",
        "Decisions.decide_transaction",
        "if get(key) != value:",
        "if False:",
        (TRANSACTIONS,),
    ),
    Mutant(
        "a transaction wakes no waiter",
        "FileStore._transact",
        "if done and self._log.handle.bell:",
        "if not done and self._log.handle.bell:",
        (f"{TRANSACTIONS}::test_waiter_for_each_key_of_a_transaction_is_rung",),
    ),
    Mutant(
        "a leader rings for the empty key after a transaction of a follower",
        "Batch._decide_for",
        "[key for each in found for key in changed_keys(*each)]",
        "[key for _, key, _ in found]",
        ("tests/unit/test_combiner.py",),
    ),
    Mutant(
        "a view that overrides operations takes part in a transaction",
        "prefix._COMPOSED",
        '    "_transact",\n',
        "",
        (TRANSACTIONS,),
    ),
    Mutant(
        "the wake key of an entry that leaves in one step stays",
        "Line._replace",
        "if each.by == IN_STEP and each not in state.wake_ups",
        "if False",
        (f"{LEFTOVERS}::test_keys_of_a_line_whose_waiter_is_killed_are_those_documented",),
    ),
    Mutant(
        "a process that changes key by key does not delete a wake key that was set in one step",
        "Line._unsettled",
        "later if self._transacts else gone",
        "later",
        (f"{LEFTOVERS}::test_keys_of_a_line_whose_waiter_is_killed_are_those_documented",),
    ),
    Mutant(
        "a follower is told its result before the records are complete",
        "Combiner._lead",
        """\
            log.update(BATCH, b"", batch, None, limit)
            is_written = True
""",
        """\
            is_written = True
            log.update(BATCH, b"", batch, None, limit)
""",
        (f"{COMBINER}::test_batch_that_meets_a_full_disk_at_any_byte_counts_as_far_as_it_is_whole",),
    ),
    Mutant(
        "a request that is claimed stays where others can claim it",
        "Batch._claim",
        """\
            if not station.remove(path):
                continue
""",
        "",
        (COMBINER,),
    ),
    Mutant(
        "an author that was not told decides again, without a look for its record",
        "Batch._decide_own",
        "            if watch is not None and watch.is_found:\n",
        "            if watch is not None and False:\n",
        (f"{COMBINER}::test_author_that_is_not_told_finds_its_record_and_does_not_append_it_again",),
    ),
    Mutant(
        "a claimed request counts as not appended although the lock was not had",
        "Combiner._give_up",
        "            error.maybe_applied = True\n",
        "",
        (f"{COMBINER}::test_request_that_was_claimed_and_not_answered_may_be_applied_at_the_deadline",),
    ),
    Mutant(
        "an author that finds no record behind a snapshot believes that there is none",
        "Batch._settle",
        "        if outcomes is not None and not outcomes.settle(watch, log.handle.header.generation):\n",
        "        if False:\n",
        (f"{COMBINER}::test_author_does_not_guess_what_a_snapshot_without_times_does_not_tell",),
    ),
    Mutant(
        "the last time of a session that a snapshot tells takes the place of a later one",
        "SessionTable.set_last_time",
        "max(time_ns, self.times.get(number, 0))",
        "time_ns",
        (f"{COMBINER}::test_last_time_of_a_snapshot_does_not_replace_a_later_one",),
    ),
    Mutant(
        "a batch of a durable log is written at once",
        "SharedLogWriter.append_batch",
        "        if handle.root.header.durable and len(records) > 1:  # a power loss may only harm the last record\n",
        "        if False:\n",
        (f"{COMBINER}::test_batch_in_a_durable_log_is_synced_record_by_record_before_anybody_is_told",),
    ),
    Mutant(
        "an author returns what it read in a durable log and could not sync",
        "Combiner._write_alone",
        "if not self._log.handle.root.header.durable and self._is_complete(write):",
        "if self._is_complete(write):",
        (f"{COMBINER}::test_author_does_not_return_what_it_read_in_a_durable_log_and_could_not_sync",),
    ),
    Mutant(
        "a leader compacts with claims in its hands",
        "Log._update_locked",
        """\
        if handle.offset + len(value) >= handle.compact_at and self.compactor.compact_if_due(len(value)):
            return MOVED
        if kind < 0:
            self._append_several(kind, value, session)
            return result
""",
        """\
        if kind < 0:
            self._append_several(kind, value, session)
            if handle.offset + len(value) >= handle.compact_at and self.compactor.compact_if_due(len(value)):
                return MOVED
            return result
        if handle.offset + len(value) >= handle.compact_at and self.compactor.compact_if_due(len(value)):
            return MOVED
""",
        (NODES,),
    ),
    Mutant(
        "an author reads its long result in the generation that it has entered meanwhile",
        "KeyValueDecider._note_value",
        "materialize(value, self._peek)",
        "value",
        (f"{COMBINER}::test_long_result_that_is_not_told_outlives_a_compaction",),
    ),
    Mutant(
        "writes are combined where reads lag",
        "Combiner._station_for",
        'shared is None or shared.access.coherence != "direct"',
        "shared is None",
        (f"{COMBINER}::test_author_that_reads_under_a_lock_by_now_writes_alone",),
    ),
    Mutant(
        "a follower that was told reads its replica and does not ask the server",
        "stores.file.FileStore.get",
        "        self._log.refresh(limit)\n",
        "",
        ("tests/contract/test_combined.py",),
    ),
    Mutant(
        "a request that was withdrawn while it was read is appended",
        "Batch._claim",
        """\
            if not station.remove(path):
                continue
""",
        "            station.remove(path)\n",
        (f"{COMBINER}::test_request_that_is_withdrawn_while_the_leader_reads_it_is_not_appended",),
    ),
    Mutant(
        "claims outlive the hold of the lock",
        "Batch.decide",
        "        self.claims, self.keys = [], []\n",
        "",
        (f"{COMBINER}::test_claims_of_an_attempt_that_is_repeated_are_not_repeated",),
    ),
    Mutant(
        "an author does not look at the seat after the publishing",
        "Combiner._follow",
        "        now, wait_s = write.started, 0.0\n",
        "        now, wait_s = write.started, LOOK_S\n",
        (f"{COMBINER}::test_author_looks_at_the_seat_once_more_behind_the_publishing",),
    ),
    Mutant(
        "a leader that leaves wakes no author",
        "Combiner._call_next",
        "            if request is not None and station.tell(slot, request.address, Answer(0, requests.LEAD)):\n",
        "            if request is not None:\n",
        (f"{COMBINER}::test_leader_that_gets_no_lock_calls_the_next_one",),
    ),
    Mutant(
        "a leader that waits for the lock shows no life",
        "_wait_and_show_life",
        "        show_life()\n",
        "",
        (f"{COMBINER}::test_leader_that_waits_long_and_shows_life_keeps_its_followers",),
    ),
    Mutant(
        "two adds of a batch are decided on one sum",
        "stores.file.operations.Draft._apply",
        "        else:\n            self._values[key] = value\n",
        "        elif kind != record.ADD:\n            self._values[key] = value\n",
        (f"{OPERATIONS}::test_batch_decides_what_the_memory_store_does_one_by_one",),
    ),
    Mutant(
        "two pops of a batch take one item",
        "stores.file.operations.Draft._apply",
        "                queue.pop()\n",
        "                pass\n",
        (f"{OPERATIONS}::test_batch_decides_what_the_memory_store_does_one_by_one",),
    ),
    Mutant(
        "a record is appended in the name of any session that asks",
        "Batch._decide_for",
        """\
        if not self._may_write_for(request):
            return []
""",
        "",
        (f"{COMBINER}::test_request_of_another_run_or_session_is_left_to_its_author",),
    ),
    Mutant(
        "a batch is longer than one request to the server",
        "Batch._claim",
        """\
                if left < 0:
                    return  # the next leader begins with this request
""",
        "",
        (f"{COMBINER}::test_batch_is_not_longer_than_one_request_to_the_server",),
    ),
    Mutant(
        "an answer to an earlier request is taken for this one",
        "Combiner._receive",
        """\
            if answer.time == write.time:
                return answer
""",
        "            return answer\n",
        (f"{COMBINER}::test_answer_to_an_earlier_request_of_the_address_is_dropped",),
    ),
    Mutant(
        "the path of a request is known only behind its publishing",
        "Combiner._write_with",
        """\
                write.path = station.request_path(write.started, f"{session}.{write.time}")
                station.publish(slot, data, write.path)
""",
        """\
                path = station.request_path(write.started, f"{session}.{write.time}")
                station.publish(slot, data, path)
                write.path = path
""",
        ("tests/faults/test_combined_interrupts.py",),
    ),
    Mutant(
        "a request that is too long for a link is not published",
        "Station.publish",
        "            self._publish_file(slot, data, path)\n",
        "            pass\n",
        (f"{COMBINER}::test_request_of_any_length_is_published_whole_and_leaves_nothing",),
    ),
    Mutant(
        "a request that is a file is not read",
        "Station.read",
        "self._read_file(path) if error.errno == system.errno.EINVAL else None",
        "None",
        (f"{COMBINER}::test_request_of_any_length_is_published_whole_and_leaves_nothing",),
    ),
    Mutant(
        "a directory whose size says nothing counts as empty",
        "Station._size_of_empty",
        "return size if is_longer and not",
        "return size if not",
        (f"{COMBINER}::test_directory_is_listed_unless_its_size_shows_that_it_is_empty",),
    ),
    Mutant(
        "a directory that is not empty teaches the size of an empty one",
        "Station._size_of_empty",
        "is_longer and not system.os.listdir(self._requests)",
        "is_longer",
        (f"{COMBINER}::test_directory_is_listed_unless_its_size_shows_that_it_is_empty",),
    ),
    Mutant(
        "a seat that an interruption hides is not left",
        "Station.try_seat",
        "slot.may_have_seat = True",
        "slot.may_have_seat = False",
        ("tests/faults/test_combined_interrupts.py",),
    ),
    Mutant(
        "a waiter that finds no poller does not stand for election",
        "NodeWaiter._begin_sleep",
        "if has_cause or was_poller or self._may_queue:",
        "if was_poller or self._may_queue:",
        (f"{WAITER}::test_waiter_that_does_not_queue_yet_asks_when_the_poller_leaves",),
    ),
    Mutant(
        "a new wait does not hurry the poller",
        "NodeWaiter.arm",
        "                self._election.hurry(state)\n",
        "                pass\n",
        ("tests/unit/test_node_polling.py::test_new_wait_makes_a_slow_poller_hurry",),
    ),
    Mutant(
        "a size that was measured beside a request stays the size of an empty directory",
        "Station.requests",
        "                self._empty_size = size\n",
        "",
        (f"{COMBINER}::test_size_of_an_empty_directory_that_was_measured_too_large_is_corrected",),
    ),
    Mutant(
        "each arming hurries the poller",
        "NodeWaiter.arm",
        "                self._has_hurried = True\n",
        "                pass\n",
        (f"{WAITER}::test_waiter_asks_for_faster_polls_once",),
    ),
    Mutant(
        "a new poller begins its heartbeat anew",
        "PollerElection.try_elect",
        "found[HURRY_BYTE], found[HEARTBEAT_BYTE]",
        "found[HURRY_BYTE], 0",
        (f"{POLLER}::test_heartbeat_goes_on_from_that_of_the_poller_before",),
    ),
    Mutant(
        "the time of an arrival begins with its wait and not with its call",
        "FileStore._new_arrival_wait",
        "None, request.started)",
        "None, None)",
        (f"{ARRIVAL_FAULTS}::test_arrival_whose_time_is_over_ends_at_once",),
    ),
    Mutant(
        "a heartbeat does not change the count",
        "PollerElection.heartbeat",
        "(self._beats + 1)",
        "(self._beats + 256)",
        (f"{POLLER}::test_poller_heartbeat_publishes_its_interval",),
    ),
    Mutant(
        "a child that a signal handler forks publishes in the name of its parent",
        "Station.publish",
        """\
        if system.process_epoch() != self.epoch:
            _no_descriptor()
""",
        "",
        ("tests/faults/test_combined_interrupts.py",),
    ),
    Mutant(
        "the second record of an arrival has the time of the next operation",
        "SharedLogWriter.__init__",
        "count(step=TIMES)",
        "count()",
        (f"{COMBINER}::test_times_of_a_session_differ_if_the_clock_steps_back_and_threads_race",),
    ),
    Mutant(
        "a torn tail is not voided",
        "Log._update_locked",
        """\
        if handle.pending or handle.is_torn:
            self.writer.void_tail()
        session = handle.lock.session
""",
        """\
        session = handle.lock.session
""",
        (SCHEDULES,),
    ),
    Mutant(
        "the lock is given back before the write",
        "LogWriter.append",
        "        size = len(data)\n        self._write(data)\n",
        "        size = len(data)\n        handle.lock.unlock()\n        self._write(data)\n",
        (SCHEDULES,),
    ),
    Mutant(
        "a bell is marked after the look at the log",
        "FileWait.look",
        """\
            if state == UNARMED and left > 0:
                self._arm()
            elif state == RUNG and left > 0 and notifier.passes_on_changes:
                reads = not notifier.read_shared_extent(self._waiter)
            found = condition.look(left if left > 0 else 0.0, reads=reads)
""",
        """\
            found = condition.look(left if left > 0 else 0.0, reads=reads)
            if state == UNARMED and left > 0:
                self._arm()
""",
        ("tests/faults/test_bell_traps.py::test_key_that_comes_just_before_the_mark_is_seen_by_the_look_behind_it",),
    ),
    Mutant(
        "a lock that is handed over keeps the range of the session that waited for it",
        "LogLock.adopt",
        "        if self.kind == OFD and session != self.session:\n            self._change_range(session)\n",
        "",
        ("tests/unit/test_log_lock.py::test_lock_that_is_adopted_is_held_in_the_name_of_its_session",),
    ),
    Mutant(
        "a waiter that becomes the poller is rung by itself",
        "NodeWaiter._begin_sleep",
        "            self._arm_by(bell, bell.read())\n",
        "            pass\n",
        (f"{WAITER}::test_waiter_that_becomes_the_poller_is_not_rung_by_its_own_notification",),
    ),
    Mutant(
        "a poller that leaves does not change the term byte",
        "PollerElection._unlock",
        "            self._put(TERM_BYTE, (self._byte(TERM_BYTE) | 1) + 1)\n",
        "",
        (f"{POLLER}::test_term_byte_differs_after_each_election_and_each_end",),
    ),
    Mutant(
        "a poller that leaves wakes no waiter",
        "PollerElection._unlock",
        "                self._bell.signal()\n",
        "                pass\n",
        (f"{POLLER}::test_poller_that_leaves_signals_the_bell_if_a_waiter_is_armed",),
    ),
    Mutant(
        "a vacancy that was wrong is believed again",
        "PollerElection._acquire",
        "            self._refused = term\n",
        "",
        (f"{POLLER}::test_vacancy_that_was_wrong_is_not_believed_again",),
    ),
    Mutant(
        "a thread beside the poller of its process believes in a vacancy",
        "PollerElection.is_vacant",
        "if self._poller is not None:",
        "if self._poller is not None and not self._held:",
        (f"{POLLER}::test_thread_beside_the_poller_of_its_process_sees_no_vacancy",),
    ),
    Mutant(
        "a waiter whose end was interrupted stays the poller of its process",
        "PollerElection._poller",
        "weakref.ref(waiter)",
        "(lambda: waiter)",
        (f"{POLLER}::test_poller_whose_end_is_interrupted_is_replaced_by_the_next_wait",),
    ),
    Mutant(
        "a waiter sleeps beside a lock that its process has, and no thread polls",
        "PollerElection.is_vacant",
        "if self._held:",
        "if False:",
        (f"{POLLER}::test_waiter_that_begins_to_sleep_while_the_poller_leaves_takes_over",),
    ),
    Mutant(
        "a wait never queues for the poller's lock",
        "NodeWaiter._must_look",
        "                self._may_queue = True\n",
        "",
        (f"{WAITER}::test_waiter_queues_for_the_role_of_the_poller_after_a_while",),
    ),
    Mutant(
        "each short wait queues for the poller's lock",
        "NodeWaiter.stand_for_election",
        "may_queue=False",
        "may_queue=True",
        (f"{WAITER}::test_waiter_queues_for_the_role_of_the_poller_after_a_while",),
    ),
    Mutant(
        "the poller is not quickened by news that nobody waits for",
        "NodeWaiter.notify_node",
        "self._expect_news(",
        "(lambda pause: pause == NEWS_POLL_S or self._expect_news(pause))(",
        (f"{WAITER}::test_poller_polls_quickly_after_news_without_a_waiter_and_then_slows_down",),
    ),
    Mutant(
        "the poller polls every millisecond while there is news that nobody waits for",
        "NodeWaiter.notify_node",
        "else NEWS_POLL_S",
        "else sleeps.POLL_FIRST_S",
        (f"{WAITER}::test_poller_polls_quickly_after_news_without_a_waiter_and_then_slows_down",),
    ),
    Mutant(
        "the descriptor that is kept for the next wait stays open when its handle is closed",
        "cancel_wait",
        "    for request in kept:\n        request.drop_spare()\n",
        "",
        (f"{KERNEL_WAIT}::test_close_of_a_handle_closes_the_kept_descriptor_and_ends_the_thread",),
    ),
    Mutant(
        "the descriptor that one handle has kept is used for the wait of another",
        "_LockThread.keeps_for",
        "        return self.spare_of is not None and self.spare_of() is lock\n",
        "        return self.spare_of is not None\n",
        (f"{KERNEL_WAIT}::test_wait_of_another_handle_opens_its_own_descriptor",),
    ),
    Mutant(
        "a thread is kept for the next wait for ever",
        "_LockThread._await_waiter",
        "                if not self.spare or left <= 0:\n",
        "                if not self.spare:\n",
        (f"{KERNEL_WAIT}::test_kept_thread_ends_when_no_wait_comes",),
    ),
    Mutant(
        "the wait in the kernel is for a range that names no session",
        "_LockThread._serve",
        "        self.session = lock.session\n",
        "",
        (f"{KERNEL_WAIT}::test_lock_from_the_kernel_is_granted_with_its_own_descriptor",),
    ),
    Mutant(
        "the liveness byte of a log that hosts share is checked under the log's lock",
        "Log.update",
        """\
                            if self._before_lock is not None:
                                self._before_lock()
                            lock.try_lock()
""",
        """\
                            lock.try_lock()
                            if self._before_lock is not None:
                                self._before_lock()
""",
        (f"{NETWORK}::test_write_after_a_pause_checks_one_half_of_liveness_before_the_lock",),
    ),
    Mutant(
        "each check of a log that hosts share is of the name and of the byte",
        "Liveness.check_byte",
        "        are_both_due = not self._handle.is_shared\n",
        "        are_both_due = True\n",
        (f"{NETWORK}::test_write_after_a_pause_checks_one_half_of_liveness_before_the_lock",),
    ),
    Mutant(
        "a torn record is taken for one byte longer than it said",
        "record_length",
        "    return int(length)\n",
        "    return int(length) + 1\n",
        ("tests/unit/test_record.py",),
    ),
    Mutant(
        "behind a VOID the chain goes on from the record before it",
        "LogWriter.void_tail",
        "            verdict = torn_tail.Skip(verdict.place + len(data), chain)",
        "            verdict = torn_tail.Skip(verdict.place + len(data), handle.chain)",
        (SCHEDULES,),
    ),
    Mutant(
        "no read to the end before a decision",
        "LocalAccess.read",
        """\
        data = system.os.read(handle.reader_fd, CHUNK)
        if data:
""",
        """\
        data = b"" if locked else system.os.read(handle.reader_fd, CHUNK)
        if data:
""",
        (SCHEDULES,),
    ),
    Mutant(
        "a look at the name is left out: the link count is believed",
        "LocalAccess._check_path",
        "        if (named.st_dev, named.st_ino) != handle.root.identity or (is_root and found.st_nlink == 0):",
        "        if is_root and found.st_nlink == 0:",
        ("tests/unit/test_generations.py::test_log_that_was_removed_is_gone_in_a_later_generation_too",),
    ),
    Mutant(
        "the bell is rung before the write",
        "FileStore.set",
        """\
        self._log.update(record.SET, name, value_bytes(value), None, self._timeout)
        if self._log.handle.bell:
            self._notifier.notify((name,))
""",
        """\
        if self._log.handle.bell:
            self._notifier.notify((name,))
        self._log.update(record.SET, name, value_bytes(value), None, self._timeout)
""",
        (SCHEDULES,),
    ),
    Mutant(
        "the log is not opened for appending",
        "HandleState.__init__",
        "        self.write_flags: int = system.os.O_RDWR | system.os.O_APPEND",
        "        self.write_flags: int = system.os.O_RDWR",
        ("tests/unit/test_file_store.py",),
    ),
    Mutant(
        "a forked child unlocks what it inherited",
        "_close_inherited",
        "        found.setdefault(kept.close, set()).update(kept)\n",
        "        found.setdefault(kept.close, set()).update(kept)\n"
        "        for fd in kept:\n"
        "            with contextlib.suppress(OSError):\n"
        "                import fcntl, struct\n"
        "                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack('hhqqi4x', fcntl.F_UNLCK, 0, 0, 0, 0))\n",
        ("tests/faults/test_fork.py::test_lock_of_the_parent_outlives_anything_its_child_does",),
    ),
    Mutant(
        "a deadline is set anew at each look",
        "FileWait.look",
        "        left = self._deadline - now\n",
        """\
        self._deadline, self._started = self._deadline + now - self._started, now
        left = self._deadline - now
""",
        ("tests/contract/test_waiting.py",),
    ),
    Mutant(
        "a file that was opened again need not be the same",
        "handle.reopen",
        "    if (found.st_dev, found.st_ino) != handle.file_identity:",
        "    if found.st_dev != handle.file_identity[0]:",
        ("tests/faults/test_paths.py::test_handle_that_was_interrupted_does_not_go_on_in_a_replacement_file",),
    ),
    Mutant(
        "the check of a length is not looked at",
        "record_length",
        "    if (length * _MULTIPLIER + chain) & _MASK != check or not RECORD_MIN <= length <= RECORD_MAX:",
        "    if not RECORD_MIN <= length <= RECORD_MAX:",
        (FLIPS,),
    ),
    Mutant(
        "the check of a length does not depend on the chain",
        "record.encode",
        "(length * _MULTIPLIER + chain) & _MASK",
        "(length * _MULTIPLIER) & _MASK",
        ("tests/unit/test_record.py",),
    ),
    Mutant(
        "the checksum of the last of many records is not compared",
        "record.decode",
        "        if last != _pack_tail(10, checksum, 10):\n            return _decode_each(data, chain)\n",
        "",
        (FLIPS,),
    ),
    Mutant(
        "nothing lies between a record and its checksum, so that the chain begins anew with each",
        "_pack_head",
        "_pack_head, _pack_tail = _HEAD.pack, _TAIL.pack\n",
        '_pack_head = _HEAD.pack\ndef _pack_tail(_, checksum, __):\n    return Struct("<IBB").pack(checksum, 10, 10)\n',
        ("tests/unit/test_record.py::test_chain_depends_on_every_record_before",),
    ),
    Mutant(
        "a key is as long as a record says",
        "record.decode",
        "        if split > stop or key_size > 1024:",
        "        if split > stop:",
        ("tests/unit/test_record.py",),
    ),
    Mutant(
        "a record whose end is a newline may be torn",
        "torn_tail.examine",
        '        torn = read_at(fd, end - 1, 1) in (b"", b"\\0")',
        '        torn = read_at(fd, end - 1, 1) in (b"", b"\\0", b"\\n")',
        (FLIPS,),
    ),
    Mutant(
        "a read without the mutex takes a value from before the log was applied again",
        "FileStore.get",
        "value.__class__ is bytes and is_current:",
        "value.__class__ is bytes:",
        ("tests/unit/test_reads_beside_replay.py",),
    ),
    Mutant(
        "a replay begins in the dictionary that other threads look into",
        "KeyValueState.reset",
        "self.values, self.queues, self._long = {}, {}, set()",
        "self.values.clear(), self.queues.clear(), self._long.clear()",
        ("tests/unit/test_reads_beside_replay.py",),
    ),
    Mutant(
        "zeros that a cache has shown are believed the next time",
        "Cursor.examine",
        "            if handle.may_lie:\n                handle.zeros.forget()\n",
        "",
        ("tests/unit/test_network_access.py::test_zeros_seen_at_the_place_of_a_later_void_are_read_again",),
    ),
    Mutant(
        "zeros of one file are believed of the next",
        "GenerationFollower._switch",
        "        handle.zeros.forget()\n",
        "",
        ("tests/unit/test_generations.py::test_zeros_seen_in_one_generation_are_not_assumed_in_the_next",),
    ),
    Mutant(
        "each zero is read again whenever it is asked for",
        "Zeros.first_data",
        "        start = max(start, self._end)\n",
        "",
        ("tests/unit/test_torn_tail.py::test_zeros_are_read_once_for_repeated_queries",),
    ),
    Mutant(
        "a search for data never runs out of time",
        "Zeros.first_data",
        """\
            if start < end and system.time.monotonic() > self.deadline:
                raise DeadlineReached
""",
        "",
        ("tests/unit/test_torn_tail.py::test_zero_search_that_ran_out_of_time_resumes_at_the_same_place",),
    ),
    Mutant(
        "what was read together with a seal, and stands after it, counts",
        "Cursor.advance",
        "                data = data[: record.end_of_first(data, record.SEAL)]\n",
        "",
        ("tests/unit/test_recovery.py::test_record_after_a_seal_is_ignored_by_all_handles",),
    ),
    Mutant(
        "two records of a session may have one time",
        "LogWriter.append",
        "self.last_time + 1)",
        "self.last_time)",
        ("tests/unit/test_format.py",),
    ),
    Mutant(
        "a file goes because it is called like one of the log",
        "is_removable",
        "        return owner.owns(header, system.os.fstat(fd).st_ino) and header.generation <= newest\n",
        "        return header.generation <= newest\n",
        ("tests/unit/test_forwarding.py",),
    ),
    Mutant(
        "a generation that is later than the newest goes, too",
        "is_removable",
        "        return owner.owns(header, system.os.fstat(fd).st_ino) and header.generation <= newest\n",
        "        return owner.owns(header, system.os.fstat(fd).st_ino)\n",
        ("tests/unit/test_forwarding.py::test_generation_later_than_the_newest_stays",),
    ),
    Mutant(
        "where inode numbers do not last all files belong to the log",
        "LogIdentity.owns",
        " and 0 not in (self.root_inode, inode)",
        "",
        ("tests/unit/test_record.py",),
    ),
    Mutant(
        "another first file and another later file are mistaken for each other",
        "provenance_of",
        "        return Provenance.OTHER_ROOT if header.generation else Provenance.COPY\n",
        "        return Provenance.COPY if header.generation else Provenance.OTHER_ROOT\n",
        ("tests/unit/test_record.py",),
    ),
    Mutant(
        "a copy goes on in the lineage of its original",
        "Compactor._next_header",
        "            lineage=log_id if handle.is_copy else handle.header.lineage,\n",
        "            lineage=handle.header.lineage,\n",
        ("tests/unit/test_generations.py::test_copy_begins_a_lineage_and_records_its_own_inode_numbers",),
    ),
    Mutant(
        "a copy is written to in the generation that was copied",
        "GenerationFollower._first_compaction",
        "        if handle.is_copy:\n            return 0\n",
        "",
        (MOVED,),
    ),
    Mutant(
        "a copy and its original are one log to the handles of a process",
        "Root.key",
        "        return self.header.log_id, *self.identity\n",
        "        return self.header.log_id, 0, 0\n",
        (MOVED,),
    ),
    Mutant(
        "every file system keeps the numbers of its inodes",
        "Mount.inodes_last",
        '        return not self.kind.startswith("fuse") or self.kind in FUSE_WITH_INODES\n',
        "        return True\n",
        (MOVED,),
    ),
    Mutant(
        "what a damaged record holds is searched for records",
        "find_next",
        "        if record.record_length(prefix, bad.chain) >= 0:\n            start = end\n",
        "",
        ("tests/faults/test_verify.py::test_log_inside_a_value_is_not_taken_for_the_records_that_follow",),
    ),
    Mutant(
        "what stands in the place of a generation is taken for it",
        "GenerationFollower._checked_header",
        "            if (header.log_id, header.generation) != (successor.log_id, successor.generation):",
        "            if header.generation != successor.generation:",
        ("tests/unit/test_generations.py::test_generation_of_another_log_is_refused",),
    ),
    Mutant(
        "a seal is appended before the generation that it names is whole",
        "Compactor._commit",
        """\
            place = write_log(fd, header._replace(inode=handle.options.inode(fd)), entries)
            # File and directory are synced before the seal, also in a log that is not durable: after a power failure a
            # seal that survived must not name a file that is incomplete or missing.
            system.sync_file(fd)
            safe_files.sync_directory(handle.path, handle.owned_fds)
            successor = GenerationRef(header.generation, header.log_id, place.offset, place.chain, name)
            is_sealing = True  # before the append: from here on, an exception does not prove that the seal is absent
            # The commit: before this record the old generation is in use, and after it the new one.
            self._writer.append(record.SEAL, b"", successor.seal(), session)
""",
        """\
            entries = list(entries)
            with open(system.os.devnull, "r+b") as nowhere:
                place = write_log(nowhere.fileno(), header._replace(inode=handle.options.inode(fd)), entries)
            successor = GenerationRef(header.generation, header.log_id, place.offset, place.chain, name)
            is_sealing = True
            self._writer.append(record.SEAL, b"", successor.seal(), session)
            write_log(fd, header._replace(inode=handle.options.inode(fd)), entries)
            system.sync_file(fd)
""",
        ("tests/faults/test_compaction.py::test_compaction_loses_nothing_when_any_of_its_calls_fails",),
    ),
    Mutant(
        "who died is not asked again with the lock",
        "Log.record_death.decide",
        """\
            if self.liveness.is_alive(number, ProcessIdentity.find()) is not False:
                return False, 0, b""
""",
        "",
        ("tests/faults/test_liveness.py::test_death_is_probed_again_before_it_is_recorded",),
    ),
    Mutant(
        "session numbers are forgotten in a compaction, and given again",
        "SessionTable.remembered",
        "            if number in ranked or number == self.last or number not in self.deaths\n",
        "            if number not in self.deaths\n",
        ("tests/unit/test_generations.py::test_dead_sessions_are_forgotten_when_the_log_is_compacted",),
    ),
    Mutant(
        "a lower restart count is let in",
        "header.classify_run",
        "        if known == job and (number == count or (number > count >= 0)):",
        "        if known == job and number == count:",
        ("tests/unit/test_runs.py",),
    ),
    Mutant(
        "a wait for the lock ends with EDEADLK",
        "LogLock.block",
        "                if error.errno != system.errno.EDEADLK:\n                    raise\n",
        "                raise\n",
        ("tests/faults/test_one_lock_space.py::test_wait_that_is_called_a_deadlock_goes_on_until_the_lock_is_free",),
    ),
    Mutant(
        "damage is believed without the lock",
        "Cursor._skip_void",
        "            if not locked:\n                raise NeedsLock\n",
        "",
        ("tests/faults/test_lock_traps.py::test_damage_seen_without_the_lock_is_looked_at_again_with_it",),
    ),
    Mutant(
        "a thread that stops reading the events does not pass that on",
        "ChangeWatcher.end_sleep",
        "        self._sleeping.discard(sleeper)\n        if self._sleeping:\n            self._pass_reader_role()",
        "        self._sleeping.discard(sleeper)",
        ("tests/faults/test_bell_traps.py::test_listener_may_leave_and_another_takes_over",),
    ),
    Mutant(
        "an fsync that failed is forgotten",
        "FileAppender._sync",
        """\
            handle.finish(StoreUnavailableError, "could not be synced, so writes may be lost; open the store again")
            raise safe_files.unavailable(error, handle.path, "syncing the log", maybe_applied=True) from error
""",
        """\
            raise safe_files.unavailable(error, handle.path, "syncing the log", maybe_applied=True) from error
""",
        ("tests/faults/test_io_errors.py::test_handle_that_failed_to_sync_refuses_all_further_calls",),
    ),
    Mutant(
        "a lock that came for who had given up is not given back",
        "_LockThread._serve",
        """\
            lock.unblock(self.fd, self.session)
            self._close_fd()
""",
        """\
            self.fd = -1
""",
        ("tests/faults/test_lock_traps.py::test_holder_that_is_stopped_is_named_at_the_deadline",),
    ),
    Mutant(
        "the lock is not taken before an update",
        "Log.update",
        "                                self._before_lock()\n                            lock.try_lock()\n",
        "                                self._before_lock()\n",
        (SCHEDULES,),
    ),
    Mutant(
        "behind a seal one goes on with the old generation's lock",
        "Log._update_locked",
        """\
            self.follower.follow()
            return MOVED  # the lock that is held is that of the sealed generation: nothing may be appended under it
""",
        """\
            self.follower.follow()
""",
        (SCHEDULES,),
    ),
    Mutant(
        "after an append the reader's offset is not moved on",
        "LogWriter.append",
        "        handle.offset = end\n",
        "",
        (SCHEDULES,),
    ),
    Mutant(
        "a pop does not look whether the queue is empty by now",
        "stores.file.operations.Decisions.decide",
        '(self._read(queue[0]), kind, b"") if queue else (None, 0, b"")',
        '(self._read(queue[0]) if queue else b"", kind, b"")',
        (SCHEDULES,),
    ),
    Mutant(
        "where long values are is not looked up again when the log goes on in another file",
        "GenerationFollower._enter",
        """\
                self._large_values.relocate(place)
""",
        "",
        ("tests/unit/test_spill.py",),
    ),
    Mutant(
        "a handle that follows a compaction remembers the dead",
        "GenerationFollower._enter",
        """\
                handle.table.forget_dead()
""",
        "",
        ("tests/unit/test_generations.py::test_long_lived_handle_forgets_the_dead_sessions_a_compaction_dropped",),
    ),
    Mutant(
        "a waiter acts on the result of the node's poller without a probe of its own",
        "DeathWatch._probes_dead",
        "return self._log.is_alive(number, home) is False",
        "return True",
        ("tests/unit/test_node_probes.py::test_wrong_result_of_death_is_refuted_without_the_lock",),
    ),
    Mutant(
        "the poller wakes nobody when a session comes to seem dead",
        "NodeWaiter.probe_for_node",
        "                    self._election.notify(range(SIZE))\n",
        "                    pass\n",
        ("tests/unit/test_node_probes.py::test_poller_probes_for_others_while_it_waits_for_a_key_only",),
    ),
    Mutant(
        "a waiter beside a poller looks each second to learn of deaths",
        "DeathWatch.is_check_due",
        "return self._asked is None or bool(self._due(self._asked, math.inf))",
        "return True",
        ("tests/unit/test_node_probes.py::test_waiters_of_a_node_probe_the_missing_rank_once_together",),
    ),
    Mutant(
        "a waiter relies on results that are not renewed",
        "DeathWatch._due",
        "is_stale = now - since > STALE_S + 2 * self._turn_s or not",
        "is_stale = not",
        ("tests/unit/test_node_probes.py::test_waiter_without_fresh_results_probes_itself",),
    ),
    Mutant(
        "a waiter without a poller probes at each look",
        "DeathWatch._due",
        "if is_late and (is_stale",
        "if (is_stale",
        ("tests/unit/test_node_probes.py::test_waiter_without_a_poller_probes_less_often_than_it_looks",),
    ),
    Mutant(
        "the poller probes all wanted sessions at once",
        "NodeProbes.probe_due",
        "in_turn[: max(1, int(PROBES_PER_S * min(passed, 1.0)))]",
        "in_turn",
        ("tests/unit/test_node_probes.py::test_slots_are_probed_in_turn_at_a_bounded_rate",),
    ),
    Mutant(
        "the poller probes for ever what was wanted once",
        "NodeProbes.probe_due",
        "            self._write(WANTED_TABLE + slot, wanted[slot] - 1)\n",
        "",
        ("tests/unit/test_node_probes.py::test_slot_is_probed_while_it_is_wanted_and_then_forgotten",),
    ),
    Mutant(
        "a node does not look past dead successors in the ring",
        "KeepAliveThread._probe_ring",
        'living += sum(found.get(node, "yes") == "yes" for node in batch)',
        "living += len(batch)",
        ("tests/rendezvous/test_ring.py::test_nodes_that_die_at_once_are_evicted_by_one_tick_of_the_rest",),
    ),
    Mutant(
        "a node probes all others at each tick",
        "KeepAliveThread.tick",
        "dead = self._probe_ring(successors, set(successors), NEIGHBOURS)",
        "dead = self._probe_ring(successors, set(successors), len(successors))",
        ("tests/rendezvous/test_ring.py::test_tick_probes_the_next_neighbours_and_no_other_session",),
    ),
    Mutant(
        "a node has one watcher",
        "NEIGHBOURS",
        "NEIGHBOURS = 3",
        "NEIGHBOURS = 1",
        ("tests/rendezvous/test_ring.py::test_node_is_watched_by_others_than_a_stopped_one",),
    ),
    Mutant(
        "a node that must complete a round never finds out about all others",
        "DynamicRendezvousHandler._agree",
        "self._keep_alive.check(state, everyone=True)",
        "self._keep_alive.check(state)",
        ("tests/rendezvous/test_ring.py::test_round_is_completed_by_a_node_that_did_not_see_the_others_join",),
    ),
    Mutant(
        "all nodes that meet probe all others",
        "DynamicRendezvousHandler._must_know_all",
        "(is_first or state == waited_for) and ",
        "",
        ("tests/rendezvous/test_ring.py::test_first_participant_alone_asks_for_all_others_before_it_has_waited",),
    ),
    Mutant(
        "participants read the state after each change",
        "DynamicRendezvousHandler._wait",
        "if self._node in state.participants[1:] and",
        "if False and",
        ("tests/rendezvous/test_ring.py::test_participants_read_the_state_a_few_times_however_many_join",),
    ),
    Mutant(
        "participants are not woken when their round is settled",
        "SharedState._ring",
        '            names.append(f"settled/{state.round}")\n',
        "            pass\n",
        ("tests/rendezvous/test_ring.py::test_change_that_settles_a_round_wakes_its_participants",),
    ),
    Mutant(
        "a node repeats a refused write at once, however long it took",
        "DynamicRendezvousHandler._read_apart",
        "if took < SLOW_WRITE_S:",
        "if True:",
        ("tests/rendezvous/test_ring.py::test_node_whose_write_was_refused_pauses_and_reads_before_it_writes_again",),
    ),
    Mutant(
        "participants poll as often, however many they are",
        "DynamicRendezvousHandler._wait",
        "POLL_INTERVAL_S * len(state.participants) / POLLS_PER_S",
        "POLL_INTERVAL_S",
        ("tests/rendezvous/test_ring.py::test_participants_poll_more_rarely_the_more_they_are",),
    ),
    Mutant(
        "a change that was not rung is never read",
        "KeepAliveThread._latest_state",
        " and self._ticks_since_read < TICKS_PER_READ",
        "",
        ("tests/rendezvous/test_ring.py::test_change_whose_maker_died_before_it_rang_is_read_after_some_ticks",),
    ),
    Mutant(
        "a list of the sessions probes each of them twice",
        "FileStore._state_of",
        "found[number] if number in found else log",
        "log",
        ("tests/faults/test_liveness.py::test_call_probes_each_session_once",),
    ),
    Mutant(
        "a session that a snapshot forgot is not known to be dead",
        "FileStore._session_states",
        " | forgotten",
        "",
        ("tests/faults/test_liveness.py::test_session_that_a_compaction_forgot_has_the_state_dead",),
    ),
    Mutant(
        "a barrier declares ranks dead that have arrived",
        "RankNeeds._judge",
        "            self._ranks = needed.judge(text)\n",
        "            pass\n",
        (
            "tests/faults/test_fail_fast.py::test_ranks_that_have_arrived_are_not_probed_any_more",
            "tests/faults/test_fail_fast.py::test_rank_that_dies_after_its_arrival_is_not_declared_dead",
        ),
    ),
    Mutant(
        "a death is recorded although the rank arrived before the lock was acquired",
        "Log.record_death.decide",
        "if is_needed is not None and not is_needed():",
        "if False:",
        ("tests/faults/test_fail_fast.py::test_death_of_a_session_that_is_needed_no_more_is_not_recorded",),
    ),
    Mutant(
        "a barrier waits on when all have arrived and the last died before it set the key",
        "Store._dead_of_needed",
        "        if not needed:\n            raise _NoRankNeeded\n",
        "",
        ("tests/faults/test_fail_fast.py::test_barrier_is_passed_when_the_last_rank_died_before_it_set_the_key",),
    ),
    Mutant(
        "a death that is forgotten while a waiter looks for it is an error",
        "DeathWatch._watch",
        "if home is None or session is None or number",
        "if home is None or number",
        ("tests/unit/test_own_session.py::test_death_forgotten_while_a_waiter_looks_for_it_is_no_error",),
    ),
    Mutant(
        "a long value is given out whatever its checksum",
        "spill.read",
        " if len(value) == spilled.size and crc32(value) == spilled.crc else None",
        "",
        ("tests/unit/test_spill.py", "tests/faults/test_spill.py"),
    ),
    Mutant(
        "a handle that did not arrive in the next file and has lost its descriptors takes itself to be there",
        "GenerationFollower.open_again",
        "handle.recovery &= ~GENERATION | was_on_the_way",
        "handle.recovery &= ~GENERATION",
        ("tests/faults/test_spill.py",),
    ),
    Mutant(
        "who waits for the lock concludes that the log was replaced, from what another thread is changing",
        "Log._reopen_for_lock",
        "        return safe_files.open_descriptor(self.handle.file, self.handle.write_flags)\n",
        "        from fscoord._log.handle import reopen\n"
        "        fd = reopen(self.handle, self.handle.write_flags)\n"
        "        self.handle.owned_fds.discard(fd)\n"
        "        return fd\n",
        ("tests/faults/test_lock_traps.py::test_log_that_goes_on_elsewhere_while_its_waiter_reopens_it_is_not_gone",),
    ),
    Mutant(
        "the first record is not chained over the header",
        "Header.decode",
        "        return header, LogPosition(size, checksum)\n",
        "        return header, LogPosition(size, 0)\n",
        ("tests/unit/test_format.py",),
    ),
    Mutant(
        "how long the lock was waited for is read from the wall clock",
        "Log._wait_for_lock",
        "        waited = system.time.monotonic() - started\n",
        "        waited = system.time.time() - started\n",
        ("tests/faults/test_lock_traps.py::test_holder_that_is_stopped_is_named_at_the_deadline",),
    ),
    Mutant(
        "a token that is over is taken",
        "lock.Fenced.set",
        "            if seen > token:\n",
        "            if seen < 0:\n",
        ("tests/contract/test_leases.py::test_value_written_with_a_token_refuses_lower_tokens",),
    ),
    Mutant(
        "a marker that could not be given back is forgotten when the log goes on in another file",
        "LogLock.next_on",
        "        following._symlink_lock = self._symlink_lock\n",
        "",
        ("tests/faults/test_every_call.py::test_operation_under_other_locks_survives_the_failure_of_every_call",),
    ),
    Mutant(
        "a rank is armed after its arrival was unlocked",
        "FileStore._write",
        "            arm,\n        )\n",
        "        )\n        if arm:\n            arm()\n",
        (MEETINGS, f"{ARRIVALS}::test_last_arrival_right_after_the_unlock_of_another_wakes_it"),
    ),
    Mutant(
        "the key that ends a barrier is set before the last arrival",
        "stores.file.operations.Decisions.decide",
        '[(kind, key, value), (record.SET, operation.done, b"1")]',
        '[(record.SET, operation.done, b"1"), (kind, key, value)]',
        (MEETINGS,),
    ),
    Mutant(
        "the last arrival sets no key",
        "stores.file.operations.Decisions.decide",
        '[(kind, key, value), (record.SET, operation.done, b"1")]',
        "[(kind, key, value)]",
        (MEETINGS,),
    ),
    Mutant(
        "the last arrival sets the key and is not recorded",
        "stores.file.operations.Decisions.decide",
        '[(kind, key, value), (record.SET, operation.done, b"1")]',
        '[(record.SET, operation.done, b"1")]',
        (MEETINGS,),
    ),
    Mutant(
        "the last arrival rings before it is there",
        "FileStore._write",
        """\
        result = self._log.update(
            operation.kind,
            operation.key,
            operation,
            self._decide if decide is None else decide,
            self._timeout if limit is None else limit,
            arm,
        )
        if self._log.handle.bell:
            self._notify(operation, result)
""",
        """\
        if operation.done:
            self._notifier.notify((operation.key, operation.done))
        result = self._log.update(
            operation.kind,
            operation.key,
            operation,
            self._decide if decide is None else decide,
            self._timeout if limit is None else limit,
            arm,
        )
        if self._log.handle.bell and not operation.done:
            self._notify(operation, result)
""",
        (MEETINGS,),
    ),
    Mutant(
        "a rank that arrives in a slot arms after it has looked",
        "Arrival.arrive",
        """\
                arm()
                return self.look(timeout, reads=True)
""",
        """\
                found = self.look(timeout, reads=True)
                arm()
                return found
""",
        (f"{ARRIVAL_SCHEDULES}::test_barriers_need_no_poll",),
    ),
    Mutant(
        "a rank looks for the end of its barrier before it arms",
        "ArrivalSlots.meet",
        """\
            waiter.arm(crc32(done) & LAST_BUCKET)
            log.refresh(timeout)
""",
        """\
            log.refresh(timeout)
            waiter.arm(crc32(done) & LAST_BUCKET)
""",
        (f"{ARRIVAL_SCHEDULES}::test_barriers_need_no_poll",),
    ),
    Mutant(
        "a rank reads the slots and not the log",
        "ArrivalSlots.meet",
        """\
            waiter.arm(crc32(done) & LAST_BUCKET)
            log.refresh(timeout)
""",
        """\
            waiter.arm(crc32(done) & LAST_BUCKET)
""",
        (f"{ARRIVAL_SCHEDULES}::test_barriers_need_no_poll",),
    ),
    Mutant(
        "slots are not cleared before a delete",
        "ArrivalSlots.clear",
        "if not key.endswith(KEYS_OF_BARRIER):",
        "if True:",
        (ARRIVAL_SLOTS,),
    ),
    Mutant(
        "slots are the same in every run",
        "ArrivalSlots.content",
        'header.log_id + run.to_bytes(8, "little")',
        "header.log_id",
        (ARRIVAL_SLOTS,),
    ),
    Mutant(
        "slots in a bell without a name count",
        "ArrivalSlots.arrived",
        "return found if found and bell.has_name() else []",
        "return found",
        (ARRIVAL_SLOTS,),
    ),
    Mutant(
        "a rank that has arrived in its slot arrives there again",
        "ArrivalSlots.begin",
        "known == content or ",
        "",
        (ARRIVAL_SLOTS,),
    ),
    Mutant(
        "the last arrival rings for its own key alone",
        "FileStore._notify",
        "(key, done) if done and result.is_last else (key,)",
        "(key,)",
        (MEETINGS,),
    ),
    Mutant(
        "a rank arrives again with each look",
        "FileWait.look",
        "condition.arrive if state == NEW else None",
        "condition.arrive",
        (ARRIVALS,),
    ),
    Mutant(
        "the last arrival is judged by what was there before it",
        "stores.file.operations.Decisions.decide",
        "self._arrived(operation, text)",
        'self._arrived(operation, current or b"0")',
        (ARRIVALS,),
    ),
    Mutant(
        "a rank sleeps though the key that ends its barrier is there",
        "stores.file.operations.Decisions._arrived",
        "PASSED if self._has(operation.done) else WAITS",
        "WAITS",
        (f"{ARRIVALS}::test_key_of_the_end_that_is_there_already_ends_the_wait_at_once",),
    ),
    Mutant(
        "the first of several records is taken for all",
        "Log._append_several",
        "for each in value]",
        "for each in value[:1]]",
        (ARRIVALS,),
    ),
    Mutant(
        "an error after the first of several records says that none was written",
        "append_each",
        "        error.maybe_applied = error.maybe_applied or not is_first\n",
        "",
        (f"{ARRIVAL_FAULTS}::test_last_arrival_whose_write_fails_says_whether_it_counts",),
    ),
    Mutant(
        "an event that another thread read before the sleep is not noticed",
        "Waiter.max_sleep",
        "            watcher.begin_sleep(self)\n",
        "            watcher.begin_sleep(self)\n            self.event_count = self.watcher.event_count\n",
        (f"{ARRIVAL_FAULTS}::test_event_that_another_thread_reads_before_the_sleep_ends_it",),
    ),
    Mutant(
        "an event that an interrupted thread has read is not counted",
        "ChangeWatcher.block",
        "                self.event_count += 1\n                if not",
        "                if not",
        (f"{ARRIVAL_FAULTS}::test_event_that_is_read_by_a_thread_that_is_interrupted_is_not_lost",),
    ),
    Mutant(
        "a wait closes a waiter that another wait uses by then",
        "FileWait.close",
        """\
            self._waiter = None
            # Only now, when `_waiter` is None: if a signal handler interrupts this call, a second `close` must not
            # close a waiter that another wait already uses.
            self._notifier.keep_spare(waiter)
""",
        """\
            self._notifier.keep_spare(waiter)
            self._waiter = None
""",
        (f"{SPARE}::test_second_close_of_a_wait_does_not_end_the_sleep_of_another",),
    ),
    Mutant(
        "a waiter whose watcher was replaced is used again",
        "ChangeNotifier.new_waiter",
        "if spare is not None and spare.watcher is watcher:",
        "if spare is not None:",
        (f"{SPARE}::test_waiter_of_an_outdated_watcher_is_not_used_again",),
    ),
    Mutant(
        "a waiter that is used again begins with the last pause of the wait before",
        "Waiter.close",
        "        self._pause = 0.0\n",
        "",
        (f"{SPARE}::test_sleep_with_a_waiter_that_is_used_again_begins_as_the_first_did",),
    ),
    Mutant(
        "a closed handle keeps a waiter, and so its descriptors",
        "ChangeNotifier.close",
        "        self._spare.clear()\n",
        "",
        (f"{SPARE}::test_closed_store_keeps_no_waiter_and_so_no_descriptor",),
    ),
    Mutant(
        "a wait that ends while its handle is closed keeps a waiter",
        "ChangeNotifier.keep_spare",
        "                self._spare.clear()\n",
        "                pass\n",
        (f"{SPARE}::test_wait_that_ends_after_the_store_was_closed_keeps_no_waiter",),
    ),
    Mutant(
        "a handle that has ended makes a bell",
        "ChangeNotifier.new_waiter",
        "                return None\n",
        "                pass\n",
        (f"{SPARE}::test_wait_after_the_handle_has_ended_makes_nothing",),
    ),
    Mutant(
        "a thread that begins to read events does not ask whether one was read for it before",
        "ChangeWatcher.block",
        "(is_unread or not sleeper.is_rung())",
        "True",
        ("tests/unit/test_watcher.py::test_thread_that_begins_to_read_events_finds_that_one_was_read_for_it",),
    ),
    Mutant(
        "an event that was read is not counted",
        "ChangeWatcher._dispatch",
        "        self.event_count += 1\n",
        "",
        (MEETINGS,),
    ),
    Mutant(
        "a short read under the lock is taken for the end",
        "Cursor.advance",
        "(handle.is_settled and not locked)",
        "handle.is_settled",
        ("tests/unit/test_recovery.py::test_short_read_without_the_lock_is_the_end_where_the_kernel_reads_to_the_end",),
    ),
    Mutant(
        "a short read is taken for the end by a handle that joins a run",
        "Cursor.advance",
        "(handle.is_settled and not locked)",
        "(not locked)",
        ("tests/unit/test_recovery.py::test_short_read_without_the_lock_is_the_end_where_the_kernel_reads_to_the_end",),
    ),
    Mutant(
        "a session that is recorded as dead still has its rank",
        "Log.has_announced",
        " and system.fork_marker[0] and not self.handle.recovery:",
        " and system.fork_marker[0]:",
        ("tests/unit/test_own_session.py",),
    ),
    Mutant(
        "the bell counts as open before it is",
        "ChangeNotifier.open_bell",
        """\
            bell = self._bell = self._find_or_warn()
            # Set this only when the bell is open. Otherwise another thread that writes meanwhile would find no bell.
            self._announcements = count
""",
        """\
            self._announcements = count
            bell = self._bell = self._find_or_warn()
""",
        ("tests/faults/test_bell_traps.py::test_write_rings_while_another_thread_opens_the_bell_of_their_handle",),
    ),
    Mutant(
        "a child that was forked while a source of events was made takes it for its own",
        "PollableSource._require_open",
        "if self.is_closed:",
        "if False:",
        (f"{EVENTS}::test_source_that_is_lost_while_it_is_made_is_refused",),
    ),
    Mutant(
        "a pidfd that a fork has closed is closed again",
        "PollableSource._close_pidfd",
        "partial(self._descriptors.remove, fd)",
        "partial(self._descriptors.discard, fd)",
        (f"{EVENTS}::test_pidfd_that_is_closed_already_is_not_closed_again",),
    ),
    Mutant(
        "a watcher that is being made is not closed by a fork",
        "ChangeWatcher.__init__",
        "        _instances.add(self)\n",
        "",
        ("tests/unit/test_watcher.py::test_watch_during_whose_making_a_signal_handler_forks_is_stale_in_the_child",),
    ),
    Mutant(
        "Ctrl-C in the finalizer of an owner loses its descriptors",
        "close_when_collected",
        "    if os.close is not _close:",
        "    if True:",
        (f"{EVENTS}::test_source_that_is_dropped_during_a_ctrl_c_leaves_no_descriptor",),
    ),
    Mutant(
        "Ctrl-C loses a descriptor between its removal and its close",
        "close_all",
        "            in_one_chain(*forget, functools.partial(close, fd))",
        """\
            descriptors.remove(fd)
            close(fd)""",
        (f"{EVENTS}::test_source_whose_close_was_interrupted_is_closed_by_a_second_close",),
    ),
    Mutant(
        "a directory of addresses that has grown teaches the size of an empty directory",
        "Station._size_of_empty",
        "system.os.stat(self.directory)",
        "system.os.stat(self._addresses)",
        (f"{COMBINER}::test_directory_of_addresses_that_has_grown_does_not_hide_requests",),
    ),
    Mutant(
        "a leader takes the ValueError of a signal handler for bytes that are no request",
        "Station.read",
        "except BinasciiError:",
        "except ValueError:",
        (f"{FOREIGN}::test_exception_of_a_handler_is_raised_by_a_leader_that_claims",),
    ),
    Mutant(
        "a text that is not ASCII fails the leader that reads it",
        "Station.read",
        'a2b_base64(text) if text.isascii() else b""',
        "a2b_base64(text)",
        (f"{COMBINER}::test_name_that_is_no_request_keeps_no_leader_from_the_requests_after_it",),
    ),
    Mutant(
        "a long file that is no request takes the place of the requests after it",
        "Batch._claim",
        "if request is not None:  #",
        "if True:  #",
        (f"{COMBINER}::test_name_that_is_no_request_keeps_no_leader_from_the_requests_after_it",),
    ),
    Mutant(
        "a leader that is interrupted when it has just left the seat counts as a leader for ever",
        "Combiner._lead",
        """\
            shared.leader = 0
            try:
                # The first call is of a C function, as in `Log.update`: otherwise Ctrl-C could leave the seat taken.
                try:
                    slot.free()
""",
        """\
            try:
                try:
                    slot.free()
                    shared.leader = 0
""",
        (f"{COMBINED_INTERRUPTS}::test_leader_that_is_interrupted_when_it_has_just_left_the_seat_can_lead_again",),
    ),
    Mutant(
        "a leader removes addresses with a slot that another thread may close",
        "Station.sweep_if_due",
        "self._sweep(slot, now)",
        "self._sweep(self._free_slots[-1], now)",
        (f"{COMBINER}::test_address_of_another_process_outlives_what_comes_between_its_removals",),
    ),
    Mutant(
        "a child that a signal handler forks removes the addresses of all processes",
        "Station._sweep",
        "name), self.epoch)",
        "name))",
        (f"{COMBINER}::test_address_of_another_process_outlives_what_comes_between_its_removals",),
    ),
    Mutant(
        "a station that is closed uses the numbers of its descriptors",
        "Station.close",
        "            self._forget_descriptors()\n",
        "",
        (f"{COMBINER}::test_station_that_is_closed_uses_no_file_that_has_got_its_descriptors",),
    ),
    Mutant(
        "a station that opens while another thread closes the handle stays open",
        "Combiner._station_for",
        "            self._drop(first)\n            return None\n",
        "            pass\n",
        (f"{COMBINER}::test_station_that_opens_while_another_thread_closes_the_handle_is_closed_too",),
    ),
    Mutant(
        "an author whose answer is lost waits until it gets the seat",
        "Combiner._follow",
        "                    claimed_by = seen\n",
        "                    pass\n",
        (f"{COMBINER}::test_author_that_is_not_told_looks_although_the_seat_is_never_free",),
    ),
    Mutant(
        "an author whose leader is still at work does not wait for the answer",
        "Combiner._follow",
        "elif claimed_by is not None and seen != claimed_by:",
        "if claimed_by is not None:",
        (f"{COMBINER}::test_author_waits_for_the_answer_as_long_as_its_leader_is_at_work",),
    ),
    Mutant(
        "a thread that gets no address leaves the directory of the host",
        "Station._add_slot",
        "            slot.close()\n            self._slots.discard(slot)\n",
        "",
        (f"{COMBINER}::test_thread_that_gets_no_address_leaves_no_directory",),
    ),
    Mutant(
        "an author that takes the seat although it need not lead calls nobody",
        "Combiner._take_over",
        "        self._call_next(station, slot)\n",
        "",
        (f"{COMBINER}::test_author_that_takes_the_seat_although_it_need_not_lead_calls_the_next_one",),
    ),
    Mutant(
        "a leader that is interrupted while it leaves the seat answers nobody",
        "Combiner._lead",
        """\
            finally:
                self._tell(station, slot, batch, is_written=is_written)
""",
        """\
            except KeyError:
                raise
            self._tell(station, slot, batch, is_written=is_written)
""",
        (f"{COMBINER}::test_leader_that_is_interrupted_behind_its_write_answers_all_its_followers",),
    ),
    Mutant(
        "a leader that is interrupted while it answers leaves the others without an answer",
        "Combiner._tell",
        """\
        except BaseException:  # of a signal handler. An answer that comes twice does no harm
            self._answer(station, slot, batch, is_written=is_written)
""",
        "        except BaseException:\n",
        (f"{COMBINER}::test_leader_that_is_interrupted_behind_its_write_answers_all_its_followers",),
    ),
    Mutant(
        "a waiter writes a token that was in the cell before",
        "Doorbell.arm",
        '(self._next_token() & _TOKENS | 1).to_bytes(CELL, "little")',
        '(1).to_bytes(CELL, "little")',
        (f"{BELL_SCHEDULES}::test_ring_is_lost_on_no_schedule",),
    ),
    Mutant(
        "two objects of a process write the same tokens",
        "Doorbell.__init__",
        "crc32(origin.encode())",
        "0",
        (f"{DOORBELL}::test_objects_of_one_process_write_different_tokens",),
    ),
    Mutant(
        "a writer signals before it clears the cell",
        "Doorbell.ring",
        "system.os.pwrite(self.fd, _CLEARED, number * CELL)\n",
        "self.signal(), system.os.pwrite(self.fd, _CLEARED, number * CELL)\n                    is_armed = False\n",
        (f"{BELL_SCHEDULES}::test_ring_is_lost_on_no_schedule",),
    ),
    Mutant(
        "a writer that is interrupted after it has cleared a cell does not signal",
        "Doorbell.ring",
        """\
        finally:
            # Signal even if a signal handler has raised: other writers rely on the thread that cleared the cell. The
""",
        """\
        except KeyError:
            raise
        else:
""",
        (f"{DOORBELL}::test_ring_that_is_interrupted_wakes_every_waiter",),
    ),
    Mutant(
        "a writer that is interrupted as it signals does not open the FIFO",
        "Doorbell.ring",
        """\
                finally:
                    self._signal_fifo()
""",
        """\
                except KeyError:
                    raise
                self._signal_fifo()
""",
        (f"{DOORBELL}::test_ring_that_is_interrupted_wakes_every_waiter",),
    ),
    Mutant(
        "a writer leaves the cell armed",
        "Doorbell.ring",
        "system.os.pwrite(self.fd, _CLEARED, number * CELL)",
        "pass",
        (f"{BELL_SCHEDULES}::test_ring_is_lost_on_no_schedule",),
    ),
    Mutant(
        "a forked child takes the record of its parent for its own",
        "Combiner._is_complete",
        " or system.process_epoch() != write.epoch",
        "",
        (f"{COMBINED_INTERRUPTS}::test_fork_of_a_follower_before_its_answer_leaves_the_record_to_the_parent",),
    ),
    Mutant(
        "a request whose publishing has ended with an error stays, although its author writes alone",
        "Combiner._take_back",
        "            station.remove(write.path)\n",
        "            pass\n",
        (f"{COMBINER}::test_request_whose_publishing_ends_with_an_error_of_a_handler_is_appended_once",),
    ),
    Mutant(
        "a request that can't be published leaves its file",
        "Station._publish_file",
        "            safe_files.unlink_quietly(temporary, self.epoch)",
        "            pass",
        (f"{COMBINER}::test_writers_go_on_alone_where_the_files_of_the_host_fail",),
    ),
    Mutant(
        "the time of a write counts from the call of which it is a part",
        "Write.begin_by",
        "            self.deadline = max(self.deadline, now + self.limit)\n",
        "",
        (f"{COMBINER}::test_late_write_that_waits_for_the_lock_has_its_whole_time",),
    ),
    Mutant(
        "the time of a follower counts from the call of which its write is a part",
        "Combiner._follow",
        "                write.begin_by(now - wait_s)\n",
        "",
        (f"{COMBINER}::test_late_write_of_a_follower_has_its_whole_time",),
    ),
    Mutant(
        "the time of a write begins anew with each look at the clock",
        "Write.begin_by",
        "            self._has_begun = True\n",
        "",
        (f"{COMBINER}::test_time_of_a_late_write_begins_once",),
    ),
    Mutant(
        "a waiter that has written nothing is shown to nobody",
        "WaitSlots._has_session",
        "                log.register(REGISTER_S)\n",
        "                pass\n",
        ("tests/faults/test_wait_slots.py::test_wait_that_cannot_register_goes_on_and_is_shown_when_the_log_is_free",),
    ),
)
"""Each is what a reviewer might let pass. `tests/mutants/run.py` shows that the tests don't."""
