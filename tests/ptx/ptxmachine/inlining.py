"""Calls of device functions: the callee's body with names of its own, in place of the call."""

from .parser import Instruction, PtxError, Variable


def inline_calls(module, kernel):
    """Replace every call in `kernel` by the callee's body; `ret` there becomes a branch behind it."""
    serial = [0]

    def expand(function, prefix, formals, stack):
        """Return the callee's instructions with renamed registers, variables and targets (relative pcs)."""
        if function.name in stack:
            raise PtxError("kernel %s: recursive call of %s is not supported" % (kernel.name, function.name))

        def rename(operand):
            kind = operand[0]
            if kind == "r":
                return ("r", prefix + operand[1])
            if kind == "s":
                if operand[1] in formals:
                    return ("s", formals[operand[1]], operand[2])
                return ("s", prefix + operand[1], operand[2]) if operand[1] in function.variables else operand
            if kind == "v":
                return ("v", [rename(item) for item in operand[1]])
            if kind == "m":
                return ("m", rename(operand[1]), operand[2])
            if kind == "!":
                return ("!", rename(operand[1]))
            if kind == "|":
                return ("|", rename(operand[1]), rename(operand[2]))
            return operand

        if prefix:
            for name, kind in function.registers.items():
                kernel.registers[prefix + name] = kind
            for name, variable in function.variables.items():
                kernel.variables[prefix + name] = Variable(
                    prefix + name, variable.space, variable.size, variable.align
                )
            for name, table in function.tables.items():
                kernel.tables[prefix + name] = table
        out, start = [], []  # start[i]: where the callee's pc i came to stand
        fix = []
        for ins in function.instructions:
            start.append(len(out))
            pred = (prefix + ins.pred[0], ins.pred[1]) if ins.pred else None
            if ins.op == "call" and ins.args[1] not in ("vprintf", "__assertfail"):
                if pred:
                    raise PtxError("PTX line %d: predicated call is not supported" % ins.line)
                callee = module.functions.get(ins.args[1])
                if callee is None or not callee.instructions:
                    raise PtxError("PTX line %d: call of unknown function %s" % (ins.line, ins.args[1]))
                serial[0] += 1
                actual = [rename(a)[1] for a in ins.args[0] + ins.args[2]]
                names = [v.name for v in callee.returns + callee.params]
                body = expand(callee, "call%d$" % serial[0], dict(zip(names, actual)), stack + [function.name])
                base = len(out)
                for item in body:
                    if item.target is not None and item.op == "bra":
                        item.target += base
                    if isinstance(item.target, list):
                        item.target = [t + base for t in item.target]
                out.extend(body)
                continue
            args = ins.args if ins.op in ("bra", "call") else [rename(a) for a in ins.args]
            if ins.op == "call":
                args = [[rename(a) for a in ins.args[0]], ins.args[1], [rename(a) for a in ins.args[2]]]
            if ins.op == "brx":
                args = [args[0]]
            copy = Instruction(ins.opcode, args, pred, ins.line, ins.source, None)
            if ins.op == "bra":
                copy.target = ins.target
                fix.append(copy)
            elif ins.op == "brx":
                copy.target = list(function.tables[ins.args[1][1]])
                fix.append(copy)
            elif ins.op in ("ret", "exit") and prefix and ins.op == "ret":
                copy = Instruction("bra", [("s", "<return>", 0)], pred, ins.line, ins.source, None)
                copy.target = len(function.instructions)
                fix.append(copy)
            out.append(copy)
        start.append(len(out))
        for ins in fix:
            ins.target = (
                start[ins.target] if not isinstance(ins.target, list) else [start[t] for t in ins.target]
            )
        return out

    kernel.instructions = expand(kernel, "", {}, [])
    for pc, ins in enumerate(kernel.instructions):
        ins.pc = pc
