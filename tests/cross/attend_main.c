/* The kernels as a program of their own: for another machine under an emulator, and for sanitizers that want no Python.
 *
 *   attend_main input output
 *
 * input:  8 int64 batch, rows_q, rows_k, heads, kv_heads, d, dv, threads; then type, alibi (0, 1); 2 double scale,
 *         softcap; int32 at, lo, hi [rows_q], pos [rows_k]; double slopes [heads] where alibi; q, k, v, dout, dense
 * output: out of the caller's type; lse, dq, dk, dv of REAL; dq, dk, dv of the caller's type
 * The keys come in two blocks, so that the second meets a state.  Backward goes twice: for sums; and with results in the caller's type,
 * which the last block writes itself, but for dk, dv of the first block: those are sums, rounded by burst_round.
 */
#include <stdio.h>
#include <stdlib.h>

#include "attend.c"

static void *get(FILE *file, size_t bytes)
{
    void *p = aligned_alloc(128, ROUND_UP(bytes + 1, 128));
    if (!p || fread(p, 1, bytes, file) != bytes) exit(3);
    return p;
}

static burst_array array(void *data, int64_t rows, int64_t heads, int64_t n, int64_t size)
{
    return (burst_array){data, {rows * heads * n * size, heads * n * size, n * size, size}};
}

int main(int argc, char **argv)
{
    FILE *in = argc == 3 ? fopen(argv[1], "rb") : NULL, *to = argc == 3 ? fopen(argv[2], "wb") : NULL;
    if (!in || !to) return 2;
    const int64_t *n = get(in, 80);
    const double *f = get(in, 16);
    burst_block b = {.batch = n[0], .heads = n[3], .kv_heads = n[4], .d = n[5], .dim_v = n[6], .threads = n[7], .type = n[8],
                     .rows_q = n[1], .scale = f[0], .softcap = f[1], .dout_factor = 1, .fresh_kv = 1};
    const int64_t rows_k = n[2], cut = rows_k / 3, size = SIZE_OF_TYPE[n[8]], real = sizeof(REAL);
    b.at = get(in, n[1] * 4);
    b.lo = get(in, n[1] * 4);
    b.hi = get(in, n[1] * 4);
    const int32_t *pos = get(in, rows_k * 4);
    if (n[9]) b.slopes = get(in, n[3] * 8);
    const int64_t queries = n[0] * n[1] * n[3], keys = n[0] * rows_k * n[4];
    b.q = array(get(in, queries * b.d * size), n[1], n[3], b.d, size);
    const burst_array k = array(get(in, keys * b.d * size), rows_k, n[4], b.d, size);
    const burst_array v = array(get(in, keys * b.dim_v * size), rows_k, n[4], b.dim_v, size);
    b.dout = array(get(in, queries * b.dim_v * size), n[1], n[3], b.dim_v, size);
    b.out = array(malloc(queries * b.dim_v * real), n[1], n[3], b.dim_v, real);
    const burst_array final = array(malloc(queries * b.dim_v * size), n[1], n[3], b.dim_v, size);
    b.dq = array(malloc(queries * b.d * real), n[1], n[3], b.d, real);
    const burst_array dk = array(malloc(keys * b.d * real), rows_k, n[4], b.d, real);
    const burst_array dv = array(malloc(keys * b.dim_v * real), rows_k, n[4], b.dim_v, real);
    const int64_t steps[3] = {n[3] * n[1] * real, n[1] * real, real};
    b.lse.data = malloc(queries * real);
    b.delta.data = malloc(queries * real);
    memcpy(b.lse.step, steps, sizeof steps);
    memcpy(b.delta.step, steps, sizeof steps);
    burst_array rounded[3]; /* dq, dk, dv */
    for (int i = 0; i < 3; i++) {
        const int64_t rows = i ? rows_k : n[1], heads = i ? n[4] : n[3], width = i < 2 ? b.d : b.dim_v;
        rounded[i] = array(malloc(n[0] * rows * heads * width * size), rows, heads, width, size);
    }
    for (int call = 0; call < 3; call++)
        for (int part = 0; part < 2; part++) {
            const int backward = call > 0, last = call == 2 && part;
            const int64_t first = part ? cut : 0;
            b.rows_k = part ? rows_k - cut : cut;
            b.pos = pos + first;
            b.k = k, b.v = v, b.dk = dk, b.dv = dv;
            b.k.data += first * k.step[1], b.v.data += first * v.step[1];
            b.dk.data += first * dk.step[1], b.dv.data += first * dv.step[1];
            b.first = b.fresh_q = !part;
            b.final = part ? final : (burst_array){0};
            b.final_dq = last ? rounded[0] : (burst_array){0};
            b.final_dk = last ? rounded[1] : (burst_array){0};
            b.final_dv = last ? rounded[2] : (burst_array){0};
            if (last) b.final_dk.data += first * b.final_dk.step[1], b.final_dv.data += first * b.final_dv.step[1];
            b.scratch_bytes = burst_scratch_bytes(&b, backward);
            b.scratch = aligned_alloc(128, ROUND_UP(b.scratch_bytes, 128));
            memset(b.scratch, 0xff, b.scratch_bytes);
            if (backward && !part) {
                b.final = final;
                burst_delta(&b);
            }
            if (backward ? burst_attend_backward(&b) : burst_attend(&b)) return 4;
            free(b.scratch);
            if (call == 1 && part) {
                fwrite(final.data, size, queries * b.dim_v, to);
                fwrite(b.lse.data, real, queries, to);
                fwrite(b.dq.data, real, queries * b.d, to);
                fwrite(dk.data, real, keys * b.d, to);
                fwrite(dv.data, real, keys * b.dim_v, to);
            }
        }
    b.rows_q = cut, b.heads = n[4];
    b.out = dk, b.final = rounded[1], b.dim_v = b.d;
    burst_round(&b);
    b.out = dv, b.final = rounded[2], b.dim_v = n[6];
    burst_round(&b);
    fwrite(rounded[0].data, size, queries * b.d, to);
    fwrite(rounded[1].data, size, keys * b.d, to);
    fwrite(rounded[2].data, size, keys * b.dim_v, to);
    return fclose(to) ? 5 : 0;
}
