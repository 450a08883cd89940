"""Bugs in the messages between hosts of several machines."""

from __future__ import annotations

from mutants.mutant import Mutant, one

_CONTROL = "host/control/machines/machines_control.cpp"
_MESH = "host/control/machines/mesh.cpp"
_LINK = "host/control/machines/link.cpp"

MUTANTS: tuple[Mutant, ...] = (
    one(
        "machines: a rank that fails goes on before others know it",
        _CONTROL,
        "    SharedControl::tell_failure(word, generation);\n    mesh_->confirm(kConfirmNs);\n",
        "    SharedControl::tell_failure(word, generation);\n",
        "fast",
        "machines",
    ),
    one(
        "machines: what is asked is answered before it is in place",
        _MESH,
        "    } else if (kind != kBeat || !payload.empty()) {",
        "    } else if (kind == kAsk && as(payload, question)) {\n"
        "        peer.link.add(kAnswer, &question, sizeof(question));\n"
        "        peer.link.send();\n"
        "    } else if (kind != kBeat || !payload.empty()) {",
        "fast",
        "machines",
    ),
    one(
        "machines: an end is shown before what the rank has told",
        _MESH,
        "    for (const Told& told : all) pass_on(from, told);\n"
        "    const std::lock_guard<std::mutex> lock(mutex_);\n    show_end(peer);\n",
        "    mutex_.lock();\n    show_end(peer);\n    mutex_.unlock();\n"
        "    for (const Told& told : all) pass_on(from, told);\n",
        "fast",
        "machines",
    ),
    one(
        "machines: a rank leaves without a word",
        _CONTROL,
        "    mesh_->tell(kBeat, own_beat());\n    mesh_->confirm(kConfirmNs);\n",
        "    mesh_->confirm(kConfirmNs);\n",
        "fast",
        "machines",
    ),
    one(
        "machines: a kernel's claim is not told to other machines",
        "host/control/teller.cpp",
        "        if (others_.further) others_.further(told_);\n",
        "",
        "fast",
        "machines",
    ),
    one(
        "machines: an address is told after the stage",
        _CONTROL,
        "void MachinesControl::tell_address() { mesh_->tell(kAddress, address_of(rank())); }",
        "void MachinesControl::tell_address() {}",
        "fast",
        "machines",
    ),
    one(
        "machines: an announcement counts in the next generation",
        _CONTROL,
        "const u64 announcement = beat.generation == generation_ ? beat.announcement : 0;",
        "const u64 announcement = beat.announcement;",
        "fast",
        "machines",
    ),
    one(
        "machines: what was announced before stays",
        _CONTROL,
        "    for (const int rank : mesh_->ranks()) memory_->store_words({host_word(header(rank)->announcement)}, 0);\n",
        "",
        "fast",
        "machines",
    ),
    one(
        "machines: a beat that was made before takes back that the rank has left",
        _CONTROL,
        "    if (beat.left != 0) memory_->release_words",
        "    memory_->release_words",
        "fast",
        "machines",
    ),
    one(
        "machines: tags are not looked at",
        _LINK,
        "        if (!(tag == tag_of(theirs_, frame, payload.data()))) return false;\n",
        "",
        "fast",
        "machines",
    ),
    one(
        "machines: frames may come again",
        _LINK,
        "frame.bytes > kMaxPayload || frame.number != taken_",
        "frame.bytes > kMaxPayload",
        "fast",
        "machines",
    ),
)
