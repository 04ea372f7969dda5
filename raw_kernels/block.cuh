/* What a launch gets: one block of queries, one block of keys, and what goes with them.
 *
 * Names, shapes and meaning are those of burstmpi/backends/base.py; burstmpi/backends/cuda.py fills the struct.
 * TYPE   (-D) 0 float64, 1 float32, 2 float16, 3 bfloat16: of q, k, v, dout and of results
 * REAL   of states, lse, delta and gradients on their way: double for float64, else float
 */
#ifndef BURST_BLOCK_CUH
#define BURST_BLOCK_CUH

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define FLOAT64 0
#define FLOAT32 1
#define FLOAT16 2
#define BFLOAT16 3

#ifndef TYPE
#define TYPE BFLOAT16
#endif
#if TYPE == FLOAT64
#define REAL double
#else
#define REAL float
#endif
#define ITEM_BYTES (TYPE == FLOAT64 ? 8 : TYPE == FLOAT32 ? 4 : 2)

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")

/* [batch, rows, heads, columns]; bytes between batches, rows and heads; columns lie side by side, 16-byte aligned. */
struct Tensor {
    char *data;
    i64 batch, row, head;
};

/* [batch, heads, rows] of REAL; bytes between batches, heads and rows. */
struct Vector {
    char *data;
    i64 batch, head, row;
};

struct Block {
    Tensor q;        /* [batch, rows_q, heads, d]        TYPE */
    Tensor k;        /* [batch, rows_k, kv_heads, d]     TYPE */
    Tensor v;        /* [batch, rows_k, kv_heads, dim_v] TYPE */
    Tensor out;      /* [batch, rows_q, heads, dim_v]    REAL, the running state; its data may be 0 where it is not needed */
    Tensor last;     /* [batch, rows_q, heads, dim_v]    TYPE, the result; data is 0 but on the last block */
    Tensor dout;     /* [batch, rows_q, heads, dim_v]    TYPE */
    Tensor dq;       /* [batch, rows_q, heads, d]        REAL */
    Tensor dk;       /* [batch, rows_k, kv_heads, d]     REAL */
    Tensor dv;       /* [batch, rows_k, kv_heads, dim_v] REAL */
    Vector lse;      /* [batch, heads, rows_q], natural log */
    Vector delta;    /* [batch, heads, rows_q] */
    const int *at;   /* [rows_q] a query's position on the keys' axis */
    const int *lo;   /* [rows_q] it sees the keys with lo <= pos < hi */
    const int *hi;   /* [rows_q] */
    const int *pos;  /* [rows_k] */
    int4 *reach;     /* [tiles_q] of a tile of queries, by survey.cu: see sight.cuh */
    int2 *extent;    /* [tiles_k] of a tile of keys, by survey.cu: see sight.cuh */
    int2 *spans;     /* [rows_q] what a query sees, in places of keys, by survey.cu; 0 where the kernel reads lo and hi itself: see sight.cuh */
    const int *keys; /* [rows_k] the key at each place, by survey.cu; 0 where positions ascend: it is the place's own number */
    int *order;      /* [tiles_q] (forward) or [tiles_k] (backward): the tiles, heaviest first, by survey.cu */
    const REAL *slopes;  /* [heads], where ALIBI */
    char *work;      /* room of the kernel family, see each .cu */
    double scale;
    double softcap;  /* where SOFTCAP */
    int batch, heads, kv_heads, d, dim_v;
    int rows_q, rows_k;
    int tile_q, tile_k;    /* rows of a tile, as the kernel that reads reach and extent has them */
    int tiles_q, tiles_k;
    int first;             /* forward: out and lse hold nothing yet */
    int fresh_q, fresh_kv; /* backward: dq, or dk and dv, hold nothing yet */
    int splits;            /* forward: parts that the keys are cut into */
    int section;           /* pairs (batch, head) whose tiles are worked on together: see order.cuh */
};

DEVICE char *at_row(const Tensor &x, int batch, int row, int head)
{
    return x.data + batch * x.batch + row * x.row + head * x.head;
}

DEVICE REAL *at_row(const Vector &x, int batch, int head, int row)
{
    return (REAL *)(x.data + batch * x.batch + head * x.head + row * x.row);
}

#endif
