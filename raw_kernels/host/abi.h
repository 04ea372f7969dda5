/* What Python hands to the kernels: one block of queries against one block of keys.
 *
 * The struct is mirrored field by field in burstmpi/backends/host.py.  Strides are in bytes and may be any; an array
 * is [batch, rows, heads, columns], a vector [batch, heads, rows].
 */
#ifndef BURST_ABI_H
#define BURST_ABI_H

#include <stdint.h>

#define BURST_ABI 6 /* raised with every change of the struct or of a word; Python refuses another number */

enum burst_type { BURST_F64 = 0, BURST_F32 = 1, BURST_F16 = 2, BURST_BF16 = 3 };
enum burst_word { BURST_GO_ON = 0, BURST_STOP = 1, BURST_CALM = 2 }; /* calm: go on, and no message is under way any more */

typedef struct {
    char *data;        /* NULL where the verb has no such array */
    int64_t step[4];   /* bytes from one batch, row, head, column to the next */
} burst_array;

typedef struct {
    char *data;
    int64_t step[3];   /* bytes from one batch, head, row to the next */
} burst_vector;

typedef struct {
    burst_array q;     /* [batch, rows_q, heads, d]      of the caller's type */
    burst_array k;     /* [batch, rows_k, kv_heads, d]   */
    burst_array v;     /* [batch, rows_k, kv_heads, dv]  */
    burst_array out;   /* [batch, rows_q, heads, dv]     state, REAL; forward */
    burst_array final; /* [batch, rows_q, heads, dv]     of the caller's type, or NULL; forward.  burst_round's target; burst_delta has out in it */
    burst_array dout;  /* [batch, rows_q, heads, dv]     of the caller's type; backward */
    burst_array dq;    /* [batch, rows_q, heads, d]      REAL; backward */
    burst_array dk;    /* [batch, rows_k, kv_heads, d]   REAL; backward */
    burst_array dv;    /* [batch, rows_k, kv_heads, dv]  REAL; backward */
    burst_array final_dq, final_dk, final_dv; /* of the caller's type, each or NULL: written in place of the sum, which is read unless it is fresh */
    burst_vector lse;  /* [batch, heads, rows_q]         REAL, natural log */
    burst_vector delta;/* [batch, heads, rows_q]         REAL; backward */
    const int32_t *at, *lo, *hi; /* [rows_q] */
    const int32_t *pos;          /* [rows_k] */
    const double *slopes;        /* [heads] or NULL: ALiBi */
    double scale, softcap;       /* softcap 0: none */
    double dout_factor;          /* a power of 2 that float32 by pieces multiplies dout by: 1, or what burst_tame says */
    int64_t batch, rows_q, rows_k, heads, kv_heads, d, dim_v;
    int64_t type;                /* enum burst_type of q, k, v, dout, final */
    int64_t first, fresh_q, fresh_kv;
    int64_t threads;
    char *scratch;
    int64_t scratch_bytes;
    int (*progress)(void);       /* called by the calling thread between tiles; returns an enum burst_word */
    int64_t interval_ns;         /* at most one call of progress in this time */
    int64_t tiles;               /* result: pairs of tiles that were computed */
} burst_block;

#endif
