"""The idioms by which csrc/ orders memory between threads, GPUs, hosts and NICs, under the names used in its
comments."""

from __future__ import annotations

from .program import CTA, GPU, SYS, Instruction, Litmus, Program, add, barrier, fence, load, store, thread

GPU0, GPU1, NIC, NIC2, HOST = "gpu 0", "gpu 1", "nic", "another queue pair", "host"


def _message(release: str = "release", acquire: str = "acquire", scope: str = SYS, reader: str = GPU1) -> Program:
    """A payload, then a signal that it is there."""
    return Program(
        (
            thread(GPU0, 0, store("data", 1), add("before", "signal", 1, release, scope)),
            thread(reader, 0, load("signal", "signal", acquire, scope), load("data", "data")),
        )
    )


def _poll(acquire: str = "acquire", scope: str = SYS) -> Program:
    """A payload and its signal; the reader polls the signal relaxed, then acquires it."""
    return Program(
        (
            thread(GPU0, 0, store("data", 1), add("before", "signal", 1, "release", SYS)),
            thread(
                GPU1,
                0,
                load("polled", "signal", "relaxed", SYS),
                load("signal", "signal", acquire, scope),
                load("data", "data"),
            ),
        )
    )


def _looked(lanes_meet: bool = True, acquire: str = "acquire") -> Program:
    """A payload and its signal; a lane looks at the signal, and another one acquires it and reads."""
    return Program(
        (
            thread(GPU0, 0, store("data", 1), add("before", "signal", 1, "release", SYS)),
            thread(GPU1, 0, load("looked", "signal", "relaxed", SYS), *([barrier(1)] if lanes_meet else [])),
            thread(
                GPU1,
                0,
                *([barrier(1)] if lanes_meet else []),
                load("signal", "signal", acquire, SYS),
                load("data", "data"),
            ),
        )
    )


def _joined(lanes_meet: bool = True, readers_meet: bool = True) -> Program:
    """One lane copies, another signals; one lane waits, another reads."""
    return Program(
        (
            thread(GPU0, 0, store("data", 1), *([barrier(1)] if lanes_meet else [])),
            thread(GPU0, 0, *([barrier(1)] if lanes_meet else []), add("before", "signal", 1, "release", SYS)),
            thread(GPU1, 0, load("signal", "signal", "acquire", SYS), *([barrier(2)] if readers_meet else [])),
            thread(GPU1, 0, *([barrier(2)] if readers_meet else []), load("data", "data")),
        )
    )


def _slot(reader_meets: bool = True, writer_meets: bool = True, release: str = "release") -> Program:
    """A slot is read, given back, and written again, by other lanes than those that signal each other."""
    return Program(
        (
            thread(GPU1, 0, load("data", "slot"), *([barrier(1)] if reader_meets else [])),
            thread(GPU1, 0, *([barrier(1)] if reader_meets else []), add("before", "next", 1, release, SYS)),
            thread(GPU0, 0, load("next", "next", "acquire", SYS), *([barrier(2)] if writer_meets else [])),
            # Stores only what the other lane has found: the second value, if the slot was given back.
            thread(GPU0, 0, *([barrier(2)] if writer_meets else []), store("slot", 2)),
        ),
        {"slot": 1},
    )


def _count(order: str = "acq_rel", second: str | None = None) -> Program:
    """Two blocks store; the last one to add to the counter sees both."""
    return Program(
        (
            thread(GPU0, 0, store("a", 1), add("first", "met", 1, order, GPU)),
            thread(GPU0, 1, store("b", 1), add("last", "met", 1, second or order, GPU), load("a", "a")),
        )
    )


def _first_posts(fenced: bool = True) -> tuple[Instruction, ...]:
    return (store("block", 1), *([fence(SYS)] if fenced else []), add("first", "filled", 1, "relaxed", GPU))


_NIC_FETCHES = thread(NIC, 0, load("record", "record", "acquire", SYS), load("block", "block", "relaxed", SYS))


def _record(scope: str = SYS, early: bool = False, fenced: bool = True) -> Program:
    """Two threads fill WQEBBs; the second one has found the first one's filled, and rings with the fence behind its
    own.
    """
    looks, fences = [load("turn", "filled", "acquire", GPU)], [fence(scope)]
    return Program(
        (
            thread(GPU0, 0, *_first_posts(fenced)),
            thread(
                GPU0,
                1,
                *(fences + looks if early else looks + fences),
                add("found", "filled", 1, "relaxed", GPU),
                store("record", 2, "relaxed", SYS),
            ),
            _NIC_FETCHES,
        )
    )


def _publish(atomic: bool = True, again: str = SYS, fenced: bool = True) -> Program:
    """Two threads fill WQEBBs, and fence them before their turns; a third one rings for both, the NIC reads the first
    one's WQEBB.
    """
    turn = [add("turn", "filled", 1, "relaxed", GPU)]
    stored = [load("turn", "filled", "relaxed", GPU), store("filled", 2, "relaxed", GPU)]
    return Program(
        (
            thread(GPU0, 0, *_first_posts(fenced)),
            thread(GPU0, 1, fence(SYS), *(turn if atomic else stored)),
            thread(
                GPU0,
                2,
                load("filled", "filled", "acquire", GPU),
                *([fence(again)] if again else []),
                store("record", "filled", "relaxed", SYS),
            ),
            _NIC_FETCHES,
        )
    )


def _doorbell(scope: str = SYS) -> Program:
    return Program(
        (
            thread(
                GPU0,
                0,
                store("record", 1, "relaxed", SYS),
                *([fence(scope)] if scope else []),
                store("doorbell", 1, "relaxed", SYS),
            ),
            thread(NIC, 0, load("doorbell", "doorbell", "acquire", SYS), load("record", "record", "relaxed", SYS)),
        )
    )


def _completion(read: str = "acquire", remembered: str = "acq_rel", seen: str = "acquire") -> Program:
    """The NIC has read a WQEBB and reports it; one thread notes it, another writes the WQEBB again."""
    return Program(
        (
            thread(NIC, 0, load("block", "block", "relaxed", SYS), store("tail", 1, "release", SYS)),
            thread(
                GPU0,
                0,
                load("tail", "tail", read, SYS),
                store("completed", "tail", "release" if remembered == "acq_rel" else "relaxed", GPU),
            ),
            thread(GPU0, 1, load("completed", "completed", seen, GPU), store("block", 2)),
        ),
        {"block": 1},
    )


def _command(upper: str = "release", looked: str = "acquire", lower_last: bool = False) -> Program:
    """A command in two halves, with its payload, for the host that polls its upper half."""
    halves = [store("low", 1, "relaxed", SYS), store("high", 1, upper, SYS)]
    return Program(
        (
            thread(GPU0, 0, store("data", 1), *(reversed(halves) if lower_last else halves)),
            thread(
                HOST, 0, load("high", "high", looked, SYS), load("low", "low", "relaxed", SYS), load("data", "data")
            ),
        )
    )


def _one_queue_pair(same: bool = True) -> Program:
    data, signal = store("data", 1, "relaxed", SYS), add("before", "signal", 1, "release", SYS)
    sender = (thread(NIC, 0, data, signal),) if same else (thread(NIC, 0, data), thread(NIC2, 0, signal))
    return Program((*sender, thread(GPU1, 0, load("signal", "signal", "acquire", SYS), load("data", "data"))))


def _lock(take: str = "acquire", before: bool = True, fenced: bool = True) -> Program:
    """Data written under the lock, before the fence that the doorbell needs, is seen by the lock's next holder."""
    writes, fences = [store("rung", 1, "relaxed", GPU)], [fence(SYS)] if fenced else []
    return Program(
        (
            thread(GPU0, 0, *(writes + fences if before else fences + writes), store("free", 1, "relaxed", GPU)),
            thread(GPU0, 1, load("free", "free", take, GPU), load("rung", "rung", "relaxed", GPU)),
        )
    )


def _last_look(
    look: str = "release", tell: str = "acquire", stored: bool = False, readers_meet: bool = True, scope: str = SYS
) -> Program:
    """A producer that gives up tells the owner, then its rows are overwritten; the owner has read them, and checks."""
    told = store("abort", 1, "release", scope) if stored else add("told", "abort", 1, tell, scope)
    return Program(
        (
            thread(GPU1, 0, load("row", "row"), *([barrier(1)] if readers_meet else [])),
            thread(GPU1, 0, *([barrier(1)] if readers_meet else []), add("look", "abort", 0, look, scope)),
            thread(GPU0, 0, told, store("row", 2)),
        ),
        {"row": 1},
    )


LITMUS = (
    Litmus(
        "mp_release_acquire_sys",
        "a thread's stores, for a thread that acquires its signal on another GPU",
        _message(),
        lambda o: o["signal"] == 1 and o["data"] == 0,
        {
            "a relaxed signal": _message(release="relaxed"),
            "a relaxed wait": _message(acquire="relaxed"),
            "device scope": _message(scope=GPU),
        },
    ),
    Litmus(
        "poll_then_acquire",
        "a thread's stores, for a thread on another GPU that polls its signal relaxed and acquires it once it is there",
        _poll(),
        lambda o: o["polled"] == 1 and (o["signal"] == 0 or o["data"] == 0),
        {"the poll alone": _poll(acquire="relaxed"), "device scope": _poll(scope=GPU)},
    ),
    Litmus(
        "look_then_acquire",
        "a thread's stores, for a lane on another GPU that acquires the signal which another lane has seen",
        _looked(),
        lambda o: o["looked"] == 1 and (o["signal"] == 0 or o["data"] == 0),
        {"a vote in place of the barrier": _looked(lanes_meet=False), "a relaxed load": _looked(acquire="relaxed")},
    ),
    Litmus(
        "bar_then_release",
        "all lanes' stores, before a barrier and one lane's signal; read by all lanes after another barrier",
        _joined(),
        lambda o: o["signal"] == 1 and o["data"] == 0,
        {
            "lanes that copy do not meet": _joined(lanes_meet=False),
            "lanes that read do not meet": _joined(readers_meet=False),
        },
    ),
    Litmus(
        "slot_given_back",
        "a slot that lanes have read, for the lanes that write it next (next, free)",
        _slot(),
        lambda o: o["data"] == 2 and o["next"] == 1,
        {
            "readers do not meet": _slot(reader_meets=False),
            "a shuffle in place of the writers' barrier": _slot(writer_meets=False),
            "given back by a relaxed add": _slot(release="relaxed"),
        },
    ),
    Litmus(
        "count_by_atomics",
        "the last block to arrive sees the stores of the others",
        _count(),
        lambda o: o["last"] == 1 and o["a"] == 0,
        {"a relaxed count": _count("relaxed"), "the last one relaxed": _count(second="relaxed")},
    ),
    Litmus(
        "ibgda_record_release",
        "work requests of this thread, and of those before it, for the NIC that reads the doorbell record",
        _record(),
        lambda o: o["turn"] == 1 and o["record"] == 2 and o["block"] == 0,
        {
            "the others' not fenced": _record(fenced=False),
            "fenced before the turn": _record(early=True),
            "device scope": _record(scope=GPU),
        },
    ),
    Litmus(
        "ibgda_fill_in_order",
        "work requests that others fence meanwhile, made valid in turn, for the NIC",
        _publish(),
        lambda o: o["turn"] == 1 and o["record"] == 2 and o["block"] == 0,
        {
            "the others' not fenced": _publish(fenced=False),
            "made valid by stores": _publish(atomic=False),
            "no fence before the record": _publish(again=""),
            "a record at device scope": _publish(again=GPU),
        },
    ),
    Litmus(
        "ibgda_doorbell",
        "the doorbell record, for the NIC that the doorbell has reached",
        _doorbell(),
        lambda o: o["doorbell"] == 1 and o["record"] == 0,
        {"no fence": _doorbell(""), "device scope": _doorbell(GPU)},
    ),
    Litmus(
        "nic_completion",
        "a WQEBB that the NIC has read, for the thread that writes it next",
        _completion(),
        lambda o: o["block"] == 2 and o["completed"] == 1 and o["tail"] == 1,
        {
            "a relaxed look at the completion": _completion(read="relaxed"),
            "remembered by a relaxed store": _completion(remembered="relaxed"),
            "a relaxed look at what is remembered": _completion(seen="relaxed"),
        },
    ),
    Litmus(
        "proxy_command",
        "a command of two words, and its payload, for the proxy's host thread",
        _command(),
        lambda o: o["high"] == 1 and (o["low"] == 0 or o["data"] == 0),
        {
            "a relaxed upper half": _command(upper="relaxed"),
            "a relaxed look": _command(looked="relaxed"),
            "the lower half last": _command(lower_last=True),
        },
    ),
    Litmus(
        "nic_same_queue_pair",
        "data and then an atomic on one queue pair, for the receiver",
        _one_queue_pair(),
        lambda o: o["signal"] == 1 and o["data"] == 0,
        {"on two queue pairs": _one_queue_pair(same=False)},
    ),
    Litmus(
        "last_look",
        "rows that an owner has read, for the producer that gives up and lets its user overwrite them",
        _last_look(),
        lambda o: o["row"] == 2 and o["look"] == 0,
        {
            "a relaxed look": _last_look(look="relaxed"),
            "told by a relaxed exchange": _last_look(tell="relaxed"),
            "told by a plain store": _last_look(stored=True),
            "lanes that read do not meet": _last_look(readers_meet=False),
            "device scope": _last_look(scope=GPU),
        },
    ),
    Litmus(
        "ring_lock",
        "requests that are rung for, between threads that ring",
        _lock(),
        lambda o: o["free"] == 1 and o["rung"] == 0,
        {
            "taken without acquire": _lock(take="relaxed"),
            "no fence": _lock(fenced=False),
            "written behind the fence": _lock(before=False),
        },
    ),
    Litmus(
        "host_flag",
        "counts, for the host that polls their flag",
        _message(reader=HOST),
        lambda o: o["signal"] == 1 and o["data"] == 0,
        {"a relaxed flag": _message(release="relaxed", reader=HOST), "block scope": _message(scope=CTA, reader=HOST)},
    ),
)
