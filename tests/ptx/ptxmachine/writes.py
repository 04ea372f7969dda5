"""Which of its pointer arguments a kernel may store through, read off its code."""

from .ops_memory import space_of
from .parser import SIZES
from .program import definitions, registers_of


def written_parameters(program):
    """Return {(parameter, byte)} whose pointers the kernel may store through, or None if it cannot be told.

    Follows every register back to what it is made of, whatever the path: (i, byte) is a value of parameter i, ("at",
    i, byte) the address of one (byte None: anywhere in it), "memory" a loaded value.  A store through a pointer that
    was itself loaded leaves the question open.
    """
    if hasattr(program, "written_parameters"):
        return program.written_parameters
    index = {param.name: i for i, param in enumerate(program.function.params)}
    origin = {}

    def trail(operand):
        if operand[0] == "s":
            return {("at", index[operand[1]], operand[2])} if operand[1] in index else set()
        return set().union(*(origin.get(name, set()) for name in registers_of(operand)))

    def results_of(ins, results):
        """Return one set a result."""
        if ins.op == "ld" and space_of(ins) == "param":
            base, offset = ins.args[1][1], ins.args[1][2]
            size, found = SIZES[ins.mods[-1]], [set() for _ in results]
            for key in trail(base):
                if isinstance(key, tuple) and key[0] == "at":
                    for n, one in enumerate(found):
                        one.add((key[1], None if key[2] is None else key[2] + offset + size * n))
            return found
        if ins.op in ("ld", "ldu", "ldmatrix", "atom"):
            return [{"memory"}] * len(results)
        found = set().union(*(trail(a) for a in ins.args[1:])) if len(ins.args) > 1 else set()
        addresses = {key for key in found if isinstance(key, tuple) and key[0] == "at"}
        if addresses and ins.op == "add" and ins.args[2][0] == "i" and len(addresses) < 32:
            moved = {(k, i, None if byte is None else byte + ins.args[2][1]) for k, i, byte in addresses}
        else:
            moved = addresses if ins.op in ("mov", "cvta") else {(k, i, None) for k, i, _ in addresses}
        return [(found - addresses) | moved] * len(results)

    changed = True
    made = [(ins, definitions(ins)[0]) for ins in program.code if ins.op not in ("bra", "call") and ins.args]
    made = [(ins, results) for ins, results in made if results]
    while changed:
        changed = False
        for ins, results in made:
            for name, new in zip(results, results_of(ins, results)):
                old = origin.setdefault(name, set())
                if not new <= old:
                    old |= new
                    changed = True
    written = set()
    for ins in program.code:
        if ins.op in ("st", "atom", "red") and space_of(ins) in ("global", "generic"):
            found = trail(ins.args[1 if ins.op == "atom" else 0][1])
            keys = {key for key in found if isinstance(key, tuple) and key[0] != "at"}
            if not keys and "memory" in found:
                written = None
                break
            written |= keys
    program.written_parameters = written
    return written
