// Run a CUDA kernel on the host, as a second opinion: one fiber a thread, one block after the other.
//
// The kernel's own text is compiled by the C++ compiler.  A fiber runs until it waits (a barrier, a shuffle) and
// then lets the next one run, in order or in reverse.  Copies of cp.async land late, at the wait.  Subnormal float
// results are flushed to zero by the processor, as -ftz=true does.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>
#include <xmmintrin.h>
#include <pmmintrin.h>

#define HOST
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(n)

struct Dim { unsigned x, y, z; };
static Dim threadIdx, blockIdx, blockDim, gridDim;

namespace fibers {
struct Copy { void* to; const void* from; int bytes; };
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  Dim thread;
  bool done;
  std::vector<std::vector<Copy>> groups;           // committed copies, oldest first
  std::vector<Copy> open;
};
struct Meeting { int arrived = 0, generation = 0; };

static std::vector<Fiber> all;
static std::vector<Meeting> warps;
static std::vector<unsigned> mailbox;              // one word a thread
static Meeting block;
static ucontext_t scheduler;
static int current;
static const std::function<void()>* body;

inline void yield() { swapcontext(&all[current].context, &scheduler); }
inline void meet(Meeting& meeting, int expected) {
  const int mine = meeting.generation;
  if (++meeting.arrived == expected) { meeting.arrived = 0; meeting.generation++; return; }
  while (meeting.generation == mine) yield();
}
inline int threads() { return (int)all.size(); }
inline void meet_warp() {
  const int warp = current / 32, size = threads() - warp * 32;
  meet(warps[warp], size < 32 ? size : 32);
}
inline void land(std::vector<Copy>& copies) {
  for (const Copy& c : copies) { memcpy(c.to, c.from, c.bytes); memset((char*)c.to + c.bytes, 0, 16 - c.bytes); }
  copies.clear();
}
inline void start() { (*body)(); all[current].done = true; swapcontext(&all[current].context, &scheduler); }

inline void run(Dim grid, Dim threads_, bool reverse, const std::function<void()>& kernel) {
  const unsigned csr = _mm_getcsr();
  _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
  _MM_SET_DENORMALS_ZERO_MODE(_MM_DENORMALS_ZERO_ON);
  gridDim = grid; blockDim = threads_; body = &kernel;
  const int count = threads_.x * threads_.y * threads_.z;
  for (unsigned z = 0; z < grid.z; z++) for (unsigned y = 0; y < grid.y; y++) for (unsigned x = 0; x < grid.x; x++) {
    blockIdx = {x, y, z};
    block = Meeting(); warps.assign((count + 31) / 32, Meeting()); mailbox.assign(count, 0); all.clear(); all.resize(count);
    for (int i = 0; i < count; i++) {
      Fiber& f = all[i];
      f.stack.resize(1 << 16); f.done = false;
      f.thread = {i % threads_.x, i / threads_.x % threads_.y, i / (threads_.x * threads_.y)};
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.data(); f.context.uc_stack.ss_size = f.stack.size(); f.context.uc_link = &scheduler;
      makecontext(&f.context, (void (*)())start, 0);
    }
    for (int left = count, rounds = 0; left;) {
      if (++rounds > 10000000) { fprintf(stderr, "fibers: no progress\n"); abort(); }
      for (int n = 0; n < count; n++) {
        current = reverse ? count - 1 - n : n;
        if (all[current].done) continue;
        threadIdx = all[current].thread;
        swapcontext(&scheduler, &all[current].context);
        left -= all[current].done;
      }
    }
  }
  _mm_setcsr(csr);
}

inline unsigned exchange(unsigned mine, int lane) {                // the word of another lane of the warp
  mailbox[current] = mine;
  meet_warp();
  const int from = current / 32 * 32 + lane;
  const unsigned out = mailbox[from < threads() ? from : current];
  meet_warp();
  return out;
}
template <typename T> inline T shuffle(T value, int lane) {
  unsigned word; memcpy(&word, &value, 4);
  word = exchange(word, lane);
  memcpy(&value, &word, 4);
  return value;
}
}  // namespace fibers

inline void resume() { threadIdx = fibers::all[fibers::current].thread; }          // others ran meanwhile
inline void __syncthreads() { fibers::meet(fibers::block, fibers::threads()); resume(); }
inline void __syncwarp() { fibers::meet_warp(); resume(); }
template <typename T> inline T __shfl_xor_sync(unsigned, T v, int d) { T r = fibers::shuffle(v, (fibers::current % 32) ^ d); resume(); return r; }
template <typename T> inline T __shfl_up_sync(unsigned, T v, int d) { int l = fibers::current % 32; T r = fibers::shuffle(v, l >= d ? l - d : l); resume(); return r; }
template <typename T> inline T __shfl_sync(unsigned, T v, int lane) { T r = fibers::shuffle(v, lane & 31); resume(); return r; }
inline unsigned __ballot_sync(unsigned, bool p) {
  unsigned out = 0;
  for (int i = 0; i < 32; i++) out |= (fibers::exchange(p, i) & 1) << i;
  resume();
  return out;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline float __int_as_float(int x) { float f; memcpy(&f, &x, 4); return f; }
template <typename T> inline T atomicAdd(T* p, T v) { T old = *p; *p = old + v; return old; }
inline float ex2(float x) { float y = (float)exp2((double)x); return fabsf(y) < 1.17549435e-38f ? 0.f : y; }
#define exp2f ex2
#define COPY(to, from, bytes) fibers::all[fibers::current].open.push_back({to, from, bytes})
#define COMMIT() (fibers::all[fibers::current].groups.push_back(fibers::all[fibers::current].open), fibers::all[fibers::current].open.clear())
#define WAIT(n) do { auto& g = fibers::all[fibers::current].groups; while (g.size() > (n)) { fibers::land(g.front()); g.erase(g.begin()); } } while (0)
