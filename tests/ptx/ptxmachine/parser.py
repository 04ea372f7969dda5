"""Read PTX text into kernels of plain instructions.

`parse(text)` returns a `Module`.  Scopes (`{ ... }` of inline asm) are flattened by renaming, calls of device
functions are inlined, every instruction knows its PTX line and, where the code was compiled with -lineinfo,
its CUDA C line.  Nothing is skipped: what is not understood raises `PtxError` with its line.

Operands are small tuples:
    ("r", name)            register             ("i", value)        integer literal
    ("f", bits, width)     float literal        ("v", [operands])   vector {a, b}
    ("m", base, offset)    address [base+off]   ("s", name, off)    variable or label
    ("!", operand)         negated predicate    ("|", a, b)         pair a|b
    ("x", name)            special register     ("_",)              sink
"""

import re
import struct

SIZES = {
    "pred": 1,
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "bf16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "b128": 16,
    "e4m3": 1,
    "e5m2": 1,
    "e4m3x2": 2,
    "e5m2x2": 2,
    "tf32": 4,
    "f32x2": 8,
}

_TOKEN = re.compile(
    r"""
    (?P<skip>[ \t\r]+|//[^\n]*|/\*.*?\*/)
  | (?P<nl>\n)
  | (?P<str>"[^"\n]*")
  | (?P<flt>0[fF][0-9a-fA-F]{8}(?![0-9a-fA-F])|0[dD][0-9a-fA-F]{16}(?![0-9a-fA-F])|\d+\.\d+(?:[eE][+-]?\d+)?)
  | (?P<num>0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?)
  | (?P<id>[.%$_a-zA-Z](?:[\w$.]|::)*)
  | (?P<op>[{}()\[\];,:@!|<>=+\-])
""",
    re.X | re.S,
)

SPECIAL = {
    "%tid",
    "%ntid",
    "%ctaid",
    "%nctaid",
    "%laneid",
    "%warpid",
    "%nwarpid",
    "%smid",
    "%nsmid",
    "%gridid",
    "%lanemask_eq",
    "%lanemask_le",
    "%lanemask_lt",
    "%lanemask_ge",
    "%lanemask_gt",
    "%clock",
    "%clock_hi",
    "%clock64",
    "%globaltimer",
    "%globaltimer_lo",
    "%globaltimer_hi",
    "%dynamic_smem_size",
    "%total_smem_size",
    "%aggr_smem_size",
    "%cluster_ctaid",
    "%cluster_nctaid",
    "%cluster_ctarank",
    "%cluster_nctarank",
    "%clusterid",
    "%nclusterid",
    "%is_explicit_cluster",
}


class PtxError(Exception):
    """PTX text that the parser or the machine does not know; the message names the line."""


class Variable:
    """A .global, .const, .shared, .local or .param variable: `size` and `align` in bytes, `data` initial bytes.

    `fixups` lists (offset, name, addend): addresses of other variables in the initialiser.
    """

    def __init__(self, name, space, size, align, data=None, extern=False, fixups=()):
        self.name, self.space, self.size, self.align = name, space, size, align
        self.data, self.extern, self.fixups = data, extern, fixups


class Instruction:
    """One PTX instruction: `op` and `mods` are the opcode cut at its dots."""

    __slots__ = ("op", "mods", "opcode", "args", "pred", "line", "source", "pc", "scope", "target")

    def __init__(self, opcode, args, pred, line, source, scope):
        parts = opcode.split(".")
        self.op, self.mods, self.opcode = parts[0], tuple(parts[1:]), opcode
        self.args, self.pred, self.line, self.source, self.scope = args, pred, line, source, scope
        self.pc, self.target = -1, None

    def __repr__(self):
        return "%s (PTX line %d)" % (self.opcode, self.line)


class Function:
    """A kernel (.entry) or device function (.func)."""

    def __init__(self, name, is_entry):
        self.name, self.is_entry = name, is_entry
        self.params, self.returns = [], []  # Variables; a kernel's carry .offset
        self.instructions, self.labels = [], {}
        self.registers = {}  # name -> PTX type
        self.variables = {}  # .local and .shared and call .param variables, by unique name
        self.tables = {}  # .branchtargets
        self.max_threads, self.required_threads, self.param_bytes = None, None, 0


class Module:
    def __init__(self):
        self.version, self.target, self.files = None, None, {}
        self.variables, self.functions = {}, {}
        self.text_lines = []

    @property
    def kernels(self):
        return {name: f for name, f in self.functions.items() if f.is_entry}


def parse(text):
    """Parse PTX `text` and return a Module whose kernels have all calls inlined."""
    from .inlining import inline_calls

    module = _Parser(text).module()
    for function in list(module.functions.values()):
        if function.is_entry and function.instructions:
            inline_calls(module, function)
    return module


class _Parser:
    def __init__(self, text):
        self.tokens, line, pos = [], 1, 0
        for match in _TOKEN.finditer(text):
            if match.start() != pos:
                raise PtxError("PTX line %d: unexpected text %r" % (line, text[pos : pos + 20]))
            pos, kind, value = match.end(), match.lastgroup, match.group()
            if kind == "nl":
                line += 1
            elif kind == "skip":
                line += value.count("\n")
            else:
                self.tokens.append((kind, value, line))
        if pos != len(text):
            raise PtxError("PTX line %d: unexpected text %r" % (line, text[pos : pos + 20]))
        self.tokens.append(("end", "", line))
        self.at = 0
        self.out = Module()
        self.out.text_lines = text.split("\n")
        self.names = 0

    # --- tokens -----------------------------------------------------------------------------------
    def peek(self):
        return self.tokens[self.at][1]

    def kind(self):
        return self.tokens[self.at][0]

    def line(self):
        return self.tokens[self.at][2]

    def take(self, wanted=None):
        kind, value, line = self.tokens[self.at]
        if wanted is not None and value != wanted:
            raise PtxError("PTX line %d: %r expected, got %r" % (line, wanted, value))
        self.at += 1
        return value

    def accept(self, wanted):
        if self.tokens[self.at][1] == wanted:
            self.at += 1
            return True
        return False

    def integer(self):
        sign = -1 if self.accept("-") else 1
        text = self.take().rstrip("U")
        try:
            return sign * (int(text[1:], 8) if re.fullmatch(r"0[0-7]+", text) else int(text, 0))
        except ValueError:
            raise PtxError("PTX line %d: integer expected, got %r" % (self.line(), text)) from None

    # --- module level -----------------------------------------------------------------------------
    def module(self):
        out = self.out
        while self.kind() != "end":
            line, word = self.line(), self.take()
            if word == ".version":
                out.version = tuple(int(x) for x in self.take().split("."))
            elif word == ".target":
                out.target = self.take()
                while self.accept(","):
                    self.take()
            elif word == ".address_size":
                if self.integer() != 64:
                    raise PtxError("PTX line %d: only 64-bit addresses are supported" % line)
            elif word == ".file":
                number = self.integer()
                out.files[number] = self.take().strip('"')
                while self.accept(","):
                    self.take()
            elif word == ".section":
                self.skip_section()
            elif word in (".extern", ".visible", ".weak", ".common"):
                self.declaration(word == ".extern")
            elif word in (".entry", ".func", ".global", ".const", ".shared"):
                self.at -= 1
                self.declaration(False)
            elif word == ".pragma":
                while self.take() != ";":
                    pass
            else:
                raise PtxError("PTX line %d: unknown directive %r" % (line, word))
        return out

    def skip_section(self):
        self.take()
        self.take("{")
        depth = 1
        while depth:
            word = self.take()
            depth += (word == "{") - (word == "}")
            if self.kind() == "end" and depth:
                raise PtxError("PTX line %d: section without end" % self.line())

    def declaration(self, extern):
        word = self.peek()
        if word in (".entry", ".func"):
            self.function()
            return
        variable = self.variable(extern)
        self.take(";")
        self.out.variables[variable.name] = variable

    def variable(self, extern=False):
        """Parse `.space .align n .type name[dims] = init` (without the `;`)."""
        line, space = self.line(), self.take()[1:]
        if space not in ("global", "const", "shared", "local", "param"):
            raise PtxError("PTX line %d: unknown variable space .%s" % (line, space))
        align, size, kind = None, None, None
        while self.peek().startswith("."):
            word = self.take()[1:]
            if word == "align":
                align = self.integer()
            elif word in SIZES:
                size, kind = SIZES[word], word
            elif word in ("ptr", "global", "const", "shared", "local", "attribute", "managed"):
                continue  # hints about a pointer parameter
            elif word in ("v2", "v4"):
                size_factor = int(word[1])
                size = SIZES[self.take()[1:]] * size_factor
            else:
                raise PtxError("PTX line %d: unknown type .%s" % (line, word))
        name, element = self.take(), size
        count, unsized = 1, False
        while self.accept("["):
            if self.accept("]"):
                unsized = True
            else:
                count *= self.integer()
                self.take("]")
        data, fixups = None, []
        if self.accept("="):
            data, fixups = self.initialiser(element)
            if unsized:
                count = len(data) // element
        total = 0 if unsized and data is None else element * count
        if data is not None:
            data = data.ljust(total, b"\0")
        out = Variable(name, space, total, align or element, data, extern or (unsized and data is None), fixups)
        out.kind = kind if total == element else None
        return out

    def initialiser(self, element):
        values, fixups = bytearray(), []

        def item():
            if self.accept("{"):
                while not self.accept("}"):
                    item()
                    self.accept(",")
                return
            kind = self.kind()
            if kind == "flt":
                values.extend(_float_bits(self.take(), element * 8).to_bytes(element, "little"))
            elif kind == "id":
                name = self.take()
                if name == "generic":
                    self.take("(")
                    name = self.take()
                    self.take(")")
                addend = self.integer() if self.accept("+") else 0
                fixups.append((len(values), name, addend))
                values.extend(bytes(element))
            else:
                values.extend((self.integer() & ((1 << 8 * element) - 1)).to_bytes(element, "little"))

        item()
        return bytes(values), fixups

    # --- functions --------------------------------------------------------------------------------
    def function(self):
        is_entry = self.take() == ".entry"
        returns = self.parameters() if not is_entry and self.peek() == "(" else []
        out = Function(self.take(), is_entry)
        out.returns = returns
        out.params = self.parameters() if self.peek() == "(" else []
        offset = 0
        for param in out.params:
            offset = -(-offset // param.align) * param.align
            param.offset = offset
            offset += param.size
        out.param_bytes = offset
        while self.peek() not in ("{", ";"):
            word = self.take()
            if word in (".maxntid", ".reqntid"):
                dims = [self.integer()]
                while self.accept(","):
                    dims.append(self.integer())
                threads = 1
                for dim in dims:
                    threads *= dim
                out.max_threads = threads
                if word == ".reqntid":
                    out.required_threads = tuple(dims + [1] * (3 - len(dims)))
            elif word in (".minnctapersm", ".maxnreg", ".maxnctapersm"):
                self.integer()
            elif word in (".noreturn", ".unified"):
                pass
            elif word == ".pragma":
                while not self.accept(";"):
                    self.take()
            else:
                raise PtxError("PTX line %d: unknown function directive %r" % (self.line(), word))
        if self.accept(";"):
            self.out.functions.setdefault(out.name, out)
            return
        _Body(self, out).parse()
        self.out.functions[out.name] = out

    def parameters(self):
        self.take("(")
        params = []
        while not self.accept(")"):
            if self.peek() == ".reg":
                raise PtxError("PTX line %d: .reg parameters are not supported" % self.line())
            params.append(self.variable())
            self.accept(",")
        return params


def _float_bits(text, width):
    if text[:2] in ("0f", "0F"):
        bits = int(text[2:], 16)
        if width == 64:
            bits = struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", bits))[0]))[0]
        return bits
    if text[:2] in ("0d", "0D"):
        bits = int(text[2:], 16)
        return (
            bits
            if width == 64
            else struct.unpack("<I", struct.pack("<f", struct.unpack("<d", struct.pack("<Q", bits))[0]))[0]
        )
    return (
        struct.unpack("<Q", struct.pack("<d", float(text)))[0]
        if width == 64
        else struct.unpack("<I", struct.pack("<f", float(text)))[0]
    )


class _Scope:
    def __init__(self, parent, suffix):
        self.parent, self.suffix = parent, suffix
        self.names, self.ranges, self.labels = {}, {}, {}


class _Body:
    """Parser of one function body."""

    def __init__(self, parser, out):
        self.p, self.out = parser, out
        self.scopes, self.scope, self.source = 0, _Scope(None, ""), None

    def parse(self):
        p = self.p
        p.take("{")
        depth = 1
        while depth:
            word, line = p.peek(), p.line()
            if p.kind() == "end":
                raise PtxError("PTX line %d: function %s without end" % (line, self.out.name))
            if word == "{":
                p.take()
                depth += 1
                self.scopes += 1
                self.scope = _Scope(self.scope, "@%d" % self.scopes)
            elif word == "}":
                p.take()
                depth -= 1
                self.scope = self.scope.parent or self.scope
            elif word == ";":
                p.take()
            elif word.startswith(".") and p.kind() == "id":
                self.directive(word)
            elif p.kind() == "id" and p.tokens[p.at + 1][1] == ":":
                self.label()
            else:
                self.instruction()
        self.resolve_labels()

    def directive(self, word):
        p = self.p
        line = p.line()
        if word == ".reg":
            p.take()
            self.register_declaration()
        elif word in (".local", ".shared", ".param", ".global", ".const"):
            variable = p.variable()
            p.take(";")
            if word in (".global", ".const"):
                p.out.variables[variable.name] = variable
            else:
                unique = variable.name + self.scope.suffix
                self.scope.names[variable.name] = ("var", unique)
                variable.name = unique
                self.out.variables[unique] = variable
        elif word == ".loc":
            p.take()
            file, row = p.integer(), p.integer()
            p.integer()
            self.source = (file, row)
            if p.accept(","):  # function_name label, inlined_at file line column
                p.take()
                p.take()
                if p.accept("+"):
                    p.integer()
                p.take(",")
                p.take("inlined_at")
                p.integer(), p.integer(), p.integer()
        elif word == ".pragma":
            while p.take() != ";":
                pass
        else:
            raise PtxError("PTX line %d: unknown directive %r" % (line, word))

    def register_declaration(self):
        p = self.p
        line, kind = p.line(), p.take()[1:]
        vector = 1
        if kind in ("v2", "v4"):
            vector, kind = int(kind[1]), p.take()[1:]
        if kind not in SIZES or vector != 1:
            raise PtxError("PTX line %d: register type .%s is not supported" % (line, kind))
        while True:
            name = p.take()
            if p.accept("<"):
                p.integer()
                p.take(">")
                self.scope.ranges[name] = kind
            else:
                self.scope.names[name] = ("reg", name + self.scope.suffix)
                self.out.registers[name + self.scope.suffix] = kind
            if not p.accept(","):
                break
        p.take(";")

    def label(self):
        p = self.p
        name = p.take()
        p.take(":")
        if p.peek() in (".branchtargets", ".calltargets", ".callprototype"):
            kind = p.take()
            if kind != ".branchtargets":
                raise PtxError("PTX line %d: indirect calls are not supported" % p.line())
            targets = []
            while not p.accept(";"):
                targets.append(p.take())
                p.accept(",")
            self.out.tables[name] = (targets, self.scope)
        else:
            self.scope.labels[name] = len(self.out.instructions)

    def lookup(self, name):
        """Return the operand that `name` stands for in the current scope."""
        scope = self.scope
        stem = re.match(r"(.*?)(\d*)$", name).group(1)
        while scope is not None:
            if name in scope.names:
                kind, unique = scope.names[name]
                return ("r", unique) if kind == "reg" else ("s", unique, 0)
            if stem in scope.ranges and stem != name:
                unique = name + scope.suffix
                self.out.registers[unique] = scope.ranges[stem]
                return ("r", unique)
            scope = scope.parent
        base = name.split(".")[0]
        if base in SPECIAL or re.fullmatch(r"%(envreg|pm|reserved_smem_offset_)\w+", base):
            return ("x", name)
        if name == "WARP_SZ":
            return ("i", 32)
        if name.startswith("%"):
            raise PtxError("PTX line %d: unknown register %s" % (self.p.line(), name))
        return ("s", name, 0)

    def instruction(self):
        p, pred, line = self.p, None, self.p.line()
        if p.accept("@"):
            negate = p.accept("!")
            operand = self.lookup(p.take())
            pred = (operand[1], negate)
        if p.kind() != "id":
            raise PtxError("PTX line %d: instruction expected, got %r" % (line, p.peek()))
        line, opcode = p.line(), p.take()
        args = self.call_arguments() if opcode.split(".")[0] == "call" else self.arguments()
        self.out.instructions.append(Instruction(opcode, args, pred, line, self.source, self.scope))

    def arguments(self):
        args = []
        if self.p.accept(";"):
            return args
        while True:
            args.append(self.operand())
            if not self.p.accept(","):
                self.p.take(";")
                return args

    def call_arguments(self):
        """`call (returns), name, (args);` → [returns, name, args]"""
        p, parts = self.p, []
        while not p.accept(";"):
            if p.accept("("):
                group = []
                while not p.accept(")"):
                    group.append(self.operand())
                    p.accept(",")
                parts.append(group)
            else:
                parts.append(p.take())
            p.accept(",")
        names = [i for i, part in enumerate(parts) if isinstance(part, str)]
        if not names:
            raise PtxError("PTX line %d: call without a name" % p.line())
        at = names[0]
        returns = parts[0] if at == 1 else []
        args = parts[at + 1] if len(parts) > at + 1 and not isinstance(parts[at + 1], str) else []
        return [returns, parts[at], args]

    def operand(self):
        p = self.p
        kind, word = p.kind(), p.peek()
        if word == "{":
            p.take()
            items = []
            while not p.accept("}"):
                items.append(self.operand())
                p.accept(",")
            return ("v", items)
        if word == "[":
            p.take()
            base, offset = self.operand(), 0
            if base[0] == "s":
                base, offset = ("s", base[1], 0), base[2]
            if p.accept("+"):
                offset += p.integer()
            elif p.peek() == "-":
                offset += p.integer()
            if p.accept(","):
                raise PtxError("PTX line %d: tensor coordinates are not supported" % p.line())
            p.take("]")
            return ("m", base, offset)
        if word == "!":
            p.take()
            return ("!", self.operand())
        if word == "-" or kind == "num":
            if word == "-" and p.tokens[p.at + 1][0] == "flt":
                p.take()
                bits = _float_bits(p.take(), 64)
                return ("f", bits ^ (1 << 63), 64)
            return ("i", p.integer())
        if kind == "flt":
            text = p.take()
            return (
                ("f", _float_bits(text, 32), 32)
                if text[:2].lower() == "0f"
                else ("f", _float_bits(text, 64), 64)
            )
        if word == "_":
            p.take()
            return ("_",)
        if kind != "id":
            raise PtxError("PTX line %d: operand expected, got %r" % (p.line(), word))
        operand = self.lookup(p.take())
        if operand[0] == "s" and p.accept("+"):
            operand = ("s", operand[1], operand[2] + p.integer())
        if p.accept("|"):
            return ("|", operand, self.operand())
        return operand

    def resolve_labels(self):
        def find(name, scope, line):
            while scope is not None:
                if name in scope.labels:
                    return scope.labels[name]
                scope = scope.parent
            raise PtxError("PTX line %d: unknown label %s" % (line, name))

        out = self.out
        for name, (targets, scope) in out.tables.items():
            out.tables[name] = [find(target, scope, 0) for target in targets]
        for pc, ins in enumerate(out.instructions):
            ins.pc = pc
            if ins.op == "bra":
                ins.target = find(ins.args[0][1], ins.scope, ins.line)
            ins.scope = None
