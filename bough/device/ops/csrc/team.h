// Threads that walk through the stages of one parallel region together.
//
// Between two stages stands a barrier. Within a stage every thread owns a run of the items, so that what it reads is
// contiguous, and helps the others when its own are done.
#pragma once

#include <stdint.h>

#include <sched.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "common.h"

namespace {

// Rounds that a thread spins at a barrier, which last as long as neighbours usually differ. Then it offers its core in
// every round: when others run on the machine, the thread that is waited for may have nothing but this core. At the
// length of a stage it sleeps.
constexpr int SPINS = 400;
constexpr int OFFERS = 400;

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct alignas(64) Counter {
    int64_t next;
};

// Calls run(first, last) for chunks of [0, items) until none is left, for thread `index` of n, of which each has a counter
// that starts at zero and a run of the items.
template <typename Run>
void take_runs(Counter* counters, int index, int n, int64_t items, int64_t chunk, const Run& run) {
    for (int i = 0; i < n; ++i) {
        int owner = index + i < n ? index + i : index + i - n;
        int64_t begin = items * owner / n, count = items * (owner + 1) / n - begin;
        for (;;) {
            int64_t first = __atomic_fetch_add(&counters[owner].next, chunk, __ATOMIC_RELAXED);
            if (first >= count) break;
            run(begin + first, begin + (first + chunk < count ? first + chunk : count));
        }
    }
}

// What the threads of a region share. Starts as zeros.
struct Team {
    static constexpr int MOST = 256;
    alignas(64) int arrived;
    alignas(64) uint32_t phase;
    alignas(64) int sleepers;
    Counter counters[3][MOST];
};

// One thread's place in its team.
class TeamThread {
  public:
    const int index, n;

    TeamThread(Team& team, int index, int n) : index(index), n(n), team_(team), stage_(0) {}

    // Everything that any thread wrote before is seen by every thread after. As long as this one spins it calls
    // meanwhile(), which takes no longer than a pause.
    template <typename Meanwhile>
    void wait(const Meanwhile& meanwhile) {
        if (n == 1) return;
        uint32_t phase = __atomic_load_n(&team_.phase, __ATOMIC_RELAXED);
        if (__atomic_add_fetch(&team_.arrived, 1, __ATOMIC_ACQ_REL) == n) {
            team_.arrived = 0;
            __atomic_store_n(&team_.phase, phase + 1, __ATOMIC_SEQ_CST);
            if (__atomic_load_n(&team_.sleepers, __ATOMIC_SEQ_CST)) wake();
            return;
        }
        for (int i = 0; i < SPINS; ++i) {
            if (__atomic_load_n(&team_.phase, __ATOMIC_ACQUIRE) != phase) return;
            meanwhile();
        }
        for (int i = 0; i < OFFERS; ++i) {
            if (__atomic_load_n(&team_.phase, __ATOMIC_ACQUIRE) != phase) return;
            sched_yield();
        }
        __atomic_add_fetch(&team_.sleepers, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&team_.phase, __ATOMIC_ACQUIRE) == phase) sleep(phase);
        __atomic_sub_fetch(&team_.sleepers, 1, __ATOMIC_SEQ_CST);
    }

    void wait() { wait(pause_briefly); }

    // Calls run(first, last) for chunks of [0, items) until no thread has any left; all threads call it alike, and
    // wait between two calls.
    template <typename Run>
    void share(int64_t items, int64_t chunk, const Run& run) {
        Counter* now = team_.counters[stage_ % 3];
        stage_ += 1;
        // Nobody looks at the counters of the stage before the last any more: they serve the next one.
        team_.counters[stage_ % 3][index].next = 0;
        take_runs(now, index, n, items, chunk, run);
    }

  private:
    Team& team_;
    int64_t stage_;

#if defined(__linux__)
    void sleep(uint32_t phase) { syscall(SYS_futex, &team_.phase, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &team_.phase, FUTEX_WAKE_PRIVATE, n, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t) { sched_yield(); }
    void wake() {}
#endif
};

}  // namespace
