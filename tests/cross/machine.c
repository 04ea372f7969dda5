/* The ROM of an emulated machine that runs one static Linux program, with no kernel below it: bochs.py builds and feeds it.
 *
 * The program and its input come from the first disk, laid out as they are to lie in memory.  It runs in ring 0 with all of
 * XCR0 set, on one thread, and its system calls are answered here.  What it writes leaves by the parallel port, and
 * behind it the exit status, 8 bytes; what goes to stdout and stderr leaves by port 0xe9.
 *
 * There are no interrupts and no exceptions: whatever would raise one ends the machine, and its log tells where.
 */
typedef unsigned char u8;
typedef unsigned long u64;

struct layout { /* sector 0 of the disk; the rest is the image */
    u64 load, bytes, entry, stack, input, input_bytes, heap, end;
};

struct state { /* at a fixed place: a ROM has no variables */
    struct layout at;
    u64 read, low, high; /* bytes of the input that were read; the heap from below (brk), and from above (mmap) */
};

#define STATE ((struct state *)0x8000)

/* Reset: real mode, then 4 GiB mapped to themselves by 1 GiB pages, then C on a stack below STATE. */
asm(".code16\n"
    ".section .reset, \"ax\"\n"
    "    jmp start16\n"
    "    .fill 13\n"
    ".section .boot, \"ax\"\n"
    "start16:\n"
    "    cli\n"
    "    lgdtl %cs:gdt_place - 0xffff0000\n"
    "    mov $0x33, %eax\n" /* PE MP ET NE */
    "    mov %eax, %cr0\n"
    "    ljmpl $0x18, $start32\n"
    ".code32\n"
    "start32:\n"
    "    mov $0x10, %eax\n"
    "    mov %eax, %ds\n"
    "    mov %eax, %es\n"
    "    mov %eax, %ss\n"
    "    movl $0x2003, 0x1000\n"
    "    mov $0x2000, %edi\n"
    "    mov $0x83, %eax\n"
    "1:  mov %eax, (%edi)\n"
    "    add $8, %edi\n"
    "    add $0x40000000, %eax\n"
    "    jnc 1b\n"
    "    mov $0x1000, %eax\n"
    "    mov %eax, %cr3\n"
    "    mov $0x40620, %eax\n" /* PAE OSFXSR OSXMMEXCPT OSXSAVE */
    "    mov %eax, %cr4\n"
    "    mov $0xc0000080, %ecx\n" /* EFER: SCE LME */
    "    mov $0x101, %eax\n"
    "    xor %edx, %edx\n"
    "    wrmsr\n"
    "    mov $0x80000033, %eax\n"
    "    mov %eax, %cr0\n"
    "    ljmp $8, $start64\n"
    ".code64\n"
    "start64:\n"
    "    mov $0xd, %eax\n" /* all that the CPU can save is enabled */
    "    xor %ecx, %ecx\n"
    "    cpuid\n"
    "    xor %ecx, %ecx\n"
    "    xsetbv\n"
    "    mov $0xc0000081, %ecx\n" /* STAR: this code's own segments, so that a system call changes nothing */
    "    xor %eax, %eax\n"
    "    mov $8, %edx\n"
    "    wrmsr\n"
    "    mov $0xc0000082, %ecx\n"
    "    mov $called, %eax\n"
    "    xor %edx, %edx\n"
    "    wrmsr\n"
    "    mov $0xc0000084, %ecx\n"
    "    xor %eax, %eax\n"
    "    wrmsr\n"
    "    mov $0x8000, %esp\n"
    "    call load\n"
    "    mov %rdx, %rsp\n"
    "    xor %edx, %edx\n"
    "    jmp *%rax\n"
    "called:\n"
    "    lea -128(%rsp), %rsp\n" /* the caller's red zone */
    "    push %rcx\n"
    "    push %r11\n"
    "    push %rdi\n"
    "    push %rsi\n"
    "    push %rdx\n"
    "    push %r8\n"
    "    push %r9\n"
    "    push %r10\n"
    "    mov %rax, %rcx\n"
    "    call serve\n"
    "    pop %r10\n"
    "    pop %r9\n"
    "    pop %r8\n"
    "    pop %rdx\n"
    "    pop %rsi\n"
    "    pop %rdi\n"
    "    pop %r11\n"
    "    pop %rcx\n"
    "    lea 128(%rsp), %rsp\n"
    "    jmp *%rcx\n"
    ".balign 8\n"
    "gdt:\n"
    "    .quad 0, 0x00209a0000000000, 0x00cf92000000ffff, 0x00cf9a000000ffff\n"
    "gdt_place:\n"
    "    .word 31\n"
    "    .long gdt\n"
    ".text\n");

static void put(int port, int value) { asm volatile("outb %b0, %w1" ::"a"(value), "d"(port)); }

static int get(int port)
{
    int value = 0;
    asm volatile("inb %w1, %b0" : "+a"(value) : "d"(port));
    return value;
}

static void copy(void *to, const void *from, u64 bytes) { asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes)::"memory"); }
static void clear(u64 to, u64 bytes) { asm volatile("rep stosb" : "+D"(to), "+c"(bytes) : "a"(0) : "memory"); }

static void print(u8 byte)
{
    put(0x378, byte);
    put(0x37a, 0x0d);
    put(0x37a, 0x0c);
}

static void leave(u64 status)
{
    for (int i = 0; i < 8; i++) print(status >> 8 * i);
    const char word[8] = {'S', 'h', 'u', 't', 'd', 'o', 'w', 'n'};
    for (int i = 0; i < 8; i++) put(0x8900, word[i]);
    for (;;) asm volatile("hlt");
}

/* Sectors of the disk, one by one. */
static void fetch(u64 to, u64 first, u64 count)
{
    for (; count--; first++) {
        put(0x1f6, 0xe0 | first >> 24);
        put(0x1f2, 1);
        for (int i = 0; i < 3; i++) put(0x1f3 + i, first >> 8 * i);
        put(0x1f7, 0x20);
        while ((get(0x1f7) & 0x88) != 0x08) {}
        u64 words = 128;
        asm volatile("rep insl" : "+D"(to), "+c"(words) : "d"(0x1f0) : "memory");
    }
}

typedef struct { u64 entry, stack; } start;

__attribute__((used)) start load(void)
{
    struct state *s = STATE;
    put(0x3f6, 2); /* no interrupts */
    fetch((u64)s, 0, 1);
    fetch(s->at.load, 1, s->at.bytes / 512);
    s->read = 0, s->low = s->at.heap, s->high = s->at.end;
    return (start){s->at.entry, s->at.stack};
}

/* Linux's system calls, as few as a program needs that reads one file and writes one. */
__attribute__((used)) long serve(u64 a, u64 b, u64 c, u64 n)
{
    struct state *s = STATE;
    switch (n) {
    case 0: /* read */
        if (c > s->at.input_bytes - s->read) c = s->at.input_bytes - s->read;
        copy((void *)b, (void *)(s->at.input + s->read), c);
        s->read += c;
        return c;
    case 1: /* write */
        for (u64 i = 0; i < c; i++) a > 2 ? print(((u8 *)b)[i]) : put(0xe9, ((u8 *)b)[i]);
        return c;
    case 20: { /* writev */
        long all = 0;
        for (u64 i = 0; i < c; i++) all += serve(a, ((u64 *)b)[2 * i], ((u64 *)b)[2 * i + 1], 1);
        return all;
    }
    case 257: return 3 + (c & 1); /* openat: to be read, or written */
    case 9: /* mmap */
        b = (b + 4095) & -4096;
        if (b > s->high - s->low) return -12;
        s->high -= b;
        clear(s->high, b);
        return s->high;
    case 12: /* brk */
        if (a < s->low || a > s->high) return s->low;
        clear(s->low, a - s->low);
        return s->low = a;
    case 158: /* arch_prctl: the thread's own memory; every other wish is granted */
        if (a == 0x1002) asm volatile("wrmsr" ::"c"(0xc0000100), "a"(b), "d"(b >> 32));
        return 0;
    case 228: clear(b, 16); return 0; /* clock_gettime: time stands still */
    case 60: case 231: leave(a); /* fall through */
    case 3: case 10: case 11: case 24: return 0; /* close, mprotect, munmap, sched_yield */
    default: return -38;
    }
}
