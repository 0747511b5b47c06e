"""The tests of each hazard, and the reasons for hazards without a test here.

Every test of this folder begins its docstring with the ids of its hazards (``D8, S2: ...``).
``D`` are deadlocks and races, ``S`` are wrong results. ``python -m tests.deadlock.catalogue``
prints the table.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
HAZARDS = [f"D{n}" for n in range(1, 37)] + [f"S{n}" for n in range(1, 28)]

ELSEWHERE = {
    "D8": [
        "tests/simulation/test_unequal_speeds.py::test_a_stalled_loader_delays_no_acknowledgement"
    ],
    "D15": ["tests/unit/coordinator/test_rounds.py::test_a_reply_to_an_old_round_is_ignored"],
    "D17": ["tests/unit/coordinator/test_averaging.py::test_tensors_on_other_devices_are_rejected"],
    "D19": [
        "tests/unit/worker/test_protocol.py::test_seven_and_four_minus_five_and_three_is_two_and_one"
    ],
    "D22": [
        "tests/unit/coordinator/test_machine.py::test_ranks_that_do_not_leave_in_time_are_named"
    ],
    "D23": [
        "tests/unit/collective/test_collectives.py::test_abort_wakes_a_waiting_rank_at_once_and_for_good"
    ],
    "D29": [
        "tests/unit/collective/test_collectives.py::test_a_rank_that_cannot_connect_is_reported_with_its_cause"
    ],
    "D30": [
        "tests/unit/device/test_cuda_device.py::test_accumulators_are_made_under_the_compute_stream_and_kept",
        "tests/gpu/test_streams.py::test_an_accumulator_of_another_stream_is_detected",
    ],
    "D9": [
        "tests/unit/test_step_path_cuda.py::test_the_step_path_neither_syncs_a_device_nor_frees_its_memory"
    ],
    "D31": ["tests/unit/data/test_loader.py::test_a_cancelled_epoch_leaves_no_batch_behind"],
    "D25": ["tests/unit/test_exactly_once.py::test_every_epoch_trains_every_index_exactly_once"],
    "S1": [
        "tests/simulation/test_unequal_speeds.py::test_no_rank_leads_by_more_than_max_batch_diff"
    ],
    "S4": [
        "tests/unit/device/test_cuda_device.py::test_the_comm_stream_is_ordered_both_ways_whichever_stream_runs_first",
        "tests/gpu/test_streams.py::test_a_missing_stream_wait_is_detected",
    ],
    "S5": [
        "tests/unit/device/test_cuda_device.py::test_an_update_keeps_the_training_since_the_snapshot",
        "tests/gpu/test_streams.py::test_a_thousand_averagings_of_two_workers_on_one_gpu_are_exact",
    ],
    "S6": [
        "tests/unit/device/test_cuda_device.py::test_a_snapshot_holds_the_state_of_its_step_and_completes_later"
    ],
    "S7": [
        "tests/unit/data/test_slots.py::test_no_slot_is_used_too_early_under_any_delays",
        "tests/unit/data/test_slots.py::test_the_checker_detects_every_missing_wait",
    ],
    "S8": [
        "tests/unit/replica/test_averaging_runtime.py::test_training_during_the_computation_of_an_average_is_kept"
    ],
    "S9": [
        "tests/unit/replica/test_averaging_runtime.py::test_every_transport_gives_the_same_average_and_divergence",
        "tests/unit/replica/test_averaging_runtime.py::test_buffers_are_averaged_and_integers_taken_from_the_most_samples",
    ],
    "S11": [
        "tests/unit/coordinator/test_convergence_guard.py::test_nudge_down_is_reached_after_three_rounds_that_do_not_fall"
    ],
    "S13": [
        "tests/parity/test_sync_equals_ddp.py::test_sync_equals_distributed_data_parallel_on_the_same_batches"
    ],
    "S15": ["tests/unit/test_exactly_once.py::test_every_epoch_trains_every_index_exactly_once"],
    "S17": [
        "tests/unit/data/test_resident.py::test_the_size_includes_all_columns_with_their_dtypes"
    ],
    "S18": ["tests/unit/loop/test_gradients.py::test_steps_equal_one_device_whatever_the_ratios"],
    "S19": [
        "tests/unit/replica/test_non_finite.py::test_a_fault_of_one_rank_ends_the_run_before_anything_is_used"
    ],
    "S20": [
        "tests/unit/coordinator/test_metrics.py::test_throughput_divides_by_the_sum_of_compute_time"
    ],
    "S21": [
        "tests/unit/checkpoint/test_resume_sync.py::test_a_run_stopped_at_any_step_equals_an_uninterrupted_one"
    ],
    "S24": ["tests/unit/timeline/test_runs.py::test_the_causes_of_each_rank_sum_to_the_wall_time"],
    "S27": [
        "tests/unit/loop/test_data_parallel.py::test_fewer_samples_than_replicas_leave_the_rest_identical"
    ],
}
"""Tests of other folders that cover a hazard."""

ABSENT = {
    "S26": "is about the benchmarks, which are no part of a run; benchmarks/README.md",
}
"""Hazards without a test here, with the reason."""

IN_PART = {
    "D30": "that PyTorch warns of it needs a GPU",
    "D9": "the calls are looked for in the source; that they deadlock needs two GPUs",
    "D17": "on the CPU every snapshot lies there anyway; a layout on another device is asked for",
    **dict.fromkeys(("S4", "S5", "S6", "S7"), "on streams of a stand-in where there is no GPU"),
    "S10": "the cost is measured by a clock; events need a GPU",
    "S22": "reads of a value are counted on the CPU; waits of a stream need a GPU",
}
"""Hazards with an untested part, with that part."""

_IDS = re.compile(r"((?:[DS]\d+(?:, )?)+):")


def found_here() -> dict[str, list[str]]:
    """The tests of this folder for each hazard, by their docstrings."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                ids = _IDS.match(ast.get_docstring(node) or "")
                for hazard in ids.group(1).split(", ") if ids else ():
                    found[hazard].append(f"{path.relative_to(ROOT).as_posix()}::{node.name}")
    return dict(found)


def table() -> dict[str, list[str]]:
    """For each hazard its tests, or the reason why there is none."""
    here = found_here()
    return {
        hazard: [
            *here.get(hazard, ()),
            *ELSEWHERE.get(hazard, ()),
            *(f"({why[hazard]})" for why in (ABSENT, IN_PART) if hazard in why),
        ]
        for hazard in HAZARDS
    }


if __name__ == "__main__":
    for hazard, lines in table().items():
        print(f"{hazard:<4}", "\n     ".join(lines))
