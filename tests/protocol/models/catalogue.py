"""Every rule that has a model, and the length of the shortest path to an error without it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .attempts import Attempts
from .blocks import Barriers, Turns
from .explore import Model, explore
from .failures import Failures, Lending, Passing
from .launches import Streams, Tickets
from .masking import Masking
from .masks import Masks
from .near_part import Looks
from .orders import Orders, Replays
from .outputs import Growth, Offers
from .proxying import Commands, Messages
from .queue_pairs import Posting
from .recovery import Recovery
from .regions import Regions
from .signals import Puts, Writers
from .streams import Blocks, Combine, Dispatch
from .two_hops import Counts, Forwarding, Returning, Summing


@dataclass(frozen=True)
class Case:
    """A rule of a model, which belongs to one of docs/PROTOCOL.md."""

    number: str
    model: Model[Any]  # with all rules, and as small as suffices for this one
    rule: str
    steps: int  # on a shortest path to the error
    wrong: str  # a regular expression for the error

    @property
    def file(self) -> str:
        return type(self.model).__module__.rsplit(".", 1)[-1]

    @property
    def name(self) -> str:
        return f"{self.number}-{self.file}-{self.rule}"

    def counterexample(self) -> list[str] | None:
        """Return the explorer's result without the rule."""
        return explore(replace(self.model, **{self.rule: False}))  # type: ignore[type-var]


DEADLOCK = "deadlock"
WRONG_ROWS = "rows that are not A's"

CASES = (
    Case("P1", Orders(calls=2), "begins_in_one_order", 6, "takes the peer's counts of call 1 for those of call 0"),
    Case("P1", Orders(calls=2), "finishes_in_one_order", 12, DEADLOCK),
    Case("P1", Orders(calls=2), "begin_waits_for_no_begin", 14, DEADLOCK),
    Case("P1", Replays(), "number_in_device_memory", 5, "reads the rows of replay 1 for those of replay 0"),
    Case("P1", Streams(), "in_launch_order", 3, "A's call 1 takes the peer's rows of call 0"),
    Case("P1", Tickets(), "last_block_tells", 3, "a block of call 0 uses the ticket of call 1"),
    Case("P1", Tickets(), "counts_blocks_that_gave_up", 10, DEADLOCK),
    Case("P1", Tickets(), "counts_them_apart", 11, "call 1, which a block has given up, is finished"),
    Case("P1", Tickets(), "finishes_before_it_tells", 5, "a block of call 0 uses the ticket of call 1"),
    Case("P1", Tickets(), "counts_from_zero", 11, DEADLOCK),
    Case("P2", Regions(regions=2), "lies_in_its_region", 12, "takes the message of 1 for its own"),
    Case("P3", Orders(), "refuses_behind_an_open_one", 16, DEADLOCK),
    Case("P3", Orders(), "refuses_by_number", 20, DEADLOCK),
    Case("P4", Regions(), "waits_for_free", 11, "B's operation 0 takes the message of 1"),
    Case("P4", Regions(), "everything_has_arrived", 17, "B's operation 1 takes the offer of 0"),
    Case("P4", Regions(), "has_read", 14, "B's operation 0 takes the message of 1"),
    Case("P4", Regions(), "readers_are_done", 7, "B's operation 0 loads the peer's rows of 1"),
    Case("P4", Regions(), "own_sends_are_done", 9, "B's operation 0 takes the message of 1"),
    Case("P5", Puts(pieces=1), "waits_for_all_of_a_use", 4, "B places stale data for put 0"),
    Case("P6", Puts(pieces=1), "one_use_at_a_time", 7, "B places the next use's for put 0 of use 0"),
    Case("P6", Writers(), "one_writer", 6, DEADLOCK),
    Case("P6", Forwarding(), "slots_for_each_origin", 5, "B places chunk 0 of A for chunk 0 of C"),
    Case("P6", Summing(), "last_row_gives_back", 6, "A takes chunk 2 for chunk 0"),
    Case("P6", Summing(), "counts_all_rows", 12, DEADLOCK),
    Case("P6", Summing(), "waits_for_all_chunks", 8, "A takes chunk 2 for chunk 0"),
    Case("P7", Puts(pieces=1), "base_moves_by_expected", 14, DEADLOCK),
    Case("P7", Writers(), "sends_without_rows", 2, DEADLOCK),
    Case("P7", Forwarding(), "chunk_for_each_chunk", 13, DEADLOCK),
    Case("P8", Puts(), "pieces_add_one_unit", 6, "B places stale data for put 0"),
    Case("P8", Puts(pieces=1), "signal_behind_its_data", 4, "B places stale data for put 0"),
    Case("P9", Offers(), "waits_for_offer", 6, "place 0 is not an output of this call"),
    Case("P9", Offers(), "offers_without_rows", 3, DEADLOCK),
    Case("P10", Growth(), "takes_rounds_meanwhile", 5, "B's kernel of 0 stores to addresses that are not mapped"),
    Case("P10", Growth(), "maps_before_launch", 10, DEADLOCK),
    Case("P10", Growth(), "offers_behind_its_counts", 11, "B's kernel of 1 stores to addresses that are not mapped"),
    Case("P11", Dispatch(), "polls", 6, DEADLOCK),
    Case("P11", Combine(), "slot_for_each_stream", 2, DEADLOCK),
    Case("P11", Blocks(), "sends_into_free_slots", 4, DEADLOCK),
    Case("P11", Blocks(), "sums_what_has_come", 2, DEADLOCK),
    Case("P11", Forwarding(), "forwarder_polls", 5, DEADLOCK),
    Case("P11", Forwarding(local_slots=2), "header_says_first", 3, "row 1 of C is sent as row 0"),
    Case("P11", Returning(), "stream_for_each_owner", 2, DEADLOCK),
    Case("P11", Returning(), "blocks_take_turns", 4, DEADLOCK),
    Case("P11", Summing(), "windows_in_order", 2, DEADLOCK),
    Case("P11", Summing(), "no_wider_than_slots", 2, DEADLOCK),
    Case("P12", Failures(), "read_is_awaited", 10, WRONG_ROWS),
    Case("P12", Failures(), "last_look", 15, WRONG_ROWS),
    Case("P12", Passing(), "looks_before_it_sends", 8, "rows that are not B's"),
    Case("P12", Passing(), "answers_first", 7, "rows that are not B's"),
    Case("P12", Lending(), "looks_behind_its_loads", 7, WRONG_ROWS),
    Case("P12", Lending(), "kernel_is_told_first", 6, WRONG_ROWS),
    Case("P14", Barriers(), "every_barrier_is_met", 3, DEADLOCK),
    Case("P14", Barriers(waits=1), "looks_behind_its_wait", 6, "given back after the block has given up"),
    Case("P14", Barriers(), "barrier_joins_answers", 8, DEADLOCK),
    Case("P14", Barriers(waits=1), "nothing_after_giving_up", 6, "given back after the block has given up"),
    Case("P14", Turns(), "one_warp_decides", 5, "the slot is given back with rows left in it"),
    Case("P14", Posting(), "taken_when_free", 9, DEADLOCK),
    Case("P14", Posting(), "looks_again", 15, "the NIC finds request 4 in the place of 0"),
    Case("P14", Posting(), "room_for_all", 15, "the NIC finds request 4 in the place of 0"),
    Case("P14", Posting(), "in_turn", 9, "the NIC finds request -1 in the place of 0"),
    Case("P14", Posting(), "waits_out_its_turn", 19, DEADLOCK),
    Case("P14", Posting(), "publishes_when_told", 12, DEADLOCK),
    Case("P14", Posting(gives_up=0), "last_rings", 47, DEADLOCK),
    Case("P14", Posting(gives_up=0), "rings_in_time", 31, DEADLOCK),
    Case("P15", Failures(failures=3), "tells_every_rank", 11, WRONG_ROWS),
    Case("P15", Failures(), "told_or_not", 14, WRONG_ROWS),
    Case("P15", Failures(), "answers_first", 13, WRONG_ROWS),
    Case("P15", Failures(), "word_of_its_generation", 16, WRONG_ROWS),
    Case("P15", Looks(), "near_part_is_on_the_gpu", 9, "rows that are not A's"),
    Case("P16", Recovery(), "sets_own_abort_word", 6, DEADLOCK),
    Case("P16", Recovery(), "waits_for_replays", 15, "A's replay 1 meets the peer's replay 0"),
    Case("P16", Recovery(), "makes_network_anew", 14, "A begins generation 3 with a signal of generation 1"),
    Case("P16", Recovery(), "first_meeting", 16, "A begins generation 3 with a signal of generation 1"),
    Case("P16", Recovery(), "second_meeting", 17, DEADLOCK),
    Case("P16", Recovery(), "one_store", 19, DEADLOCK),
    Case("P16", Attempts(), "joins_later_attempt", 5, "recover raises although no rank was interrupted"),
    Case("P16", Attempts(each_by_itself=True), "ends_what_others_may_have_begun", 11, DEADLOCK),
    Case("P17", Masks(), "counts_carry_the_mask", 11, "A and B end well, one leaves out no rank, the other C"),
    Case("P17", Masks(), "left_out_are_not_waited_for", 5, "all leave out the same, and yet one fails"),
    Case("P17", Counts(), "forwarder_waits", 7, "C has all counts, and leaves out D, but A no rank"),
    Case("P17", Counts(), "both_messages_carry_the_mask", 10, "C has all counts, and leaves out no rank, but D B"),
    Case("P17", Masking(), "told_first", 7, "C ends well with rows of B's operation 1"),
    Case("P17", Masking(), "looks_last", 8, "C ends well with rows of B's operation 1"),
    Case("P17", Masking(), "decided_once", 6, "one block of B places C's rows"),
    Case("P17", Masking(), "closes_the_connection", 7, "C's chunk of operation 0 is in B's operation 1"),
    Case("P17", Masking(), "tells_itself_alone", 4, "B fails, although it continued without C"),
    Case("P18", Commands(), "laps_in_both_halves", 3, "the host takes half of command none and half of command 0"),
    Case("P18", Commands(), "lap_of_each_position", 11, DEADLOCK),
    Case("P18", Commands(), "taken_when_free", 14, DEADLOCK),
    Case("P18", Commands(), "room_for_all", 9, DEADLOCK),
    Case("P18", Messages(), "drops_repeats", 8, "B places rows that have not arrived"),
    Case("P18", Messages(), "last_says_how_many", 11, "B places rows that have not arrived"),
    Case("P18", Messages(), "bounds_what_flies", 14, DEADLOCK),
    Case("P18", Messages(fails=0), "retires_when_delivered", 13, "B places rows of the next use for those of use 0"),
    Case("P18", Messages(), "lost_is_not_done", 4, "A has succeeded, and B waits for a message that never arrives"),
)

# With all rules: also larger models than those that suffice above.
LARGER = (
    Attempts(ranks=3),
    Attempts(ranks=3, each_by_itself=True),
    Orders(calls=4),
    Regions(senders=2, operations=3),
    Regions(regions=2, senders=2, operations=4),
    Barriers(waits=3),
    Commands(commands=4, puts=((1, 2, 2), (2, 1), (1, 1))),
    Messages(messages=3),
)
MODELS = tuple(dict.fromkeys((*(case.model for case in CASES), *LARGER)))
