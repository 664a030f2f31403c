// Threads that walk through the stages of one parallel region together.
//
// Within a stage every thread owns a run of the items, so that what it reads is contiguous, and helps the others when its own
// are done. A stage is over when its items are done, not when all threads have come: where other programs run on the
// machine, a thread may be without a core for a hundred stages, which are then the others'. Who ends a stage does what one
// thread has to do before the next.
#pragma once

#include <stdint.h>

#include <sched.h>
#include <string.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "common.h"

namespace {

// Rounds that a thread spins at the end of a stage, which last as long as neighbours usually differ. Then it offers its
// core in every round: when others run on the machine, the thread that is waited for may have nothing but this core. At
// the length of a stage it sleeps.
constexpr int SPINS = 400;
constexpr int OFFERS = 400;

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr int MOST_THREADS = 256;    // of a region

// Which cores the threads of a region are on, as far as they have said so. Starts as zeros.
//
// Behind a pause threads are woken where there is room, and moved about later on. Where two of them come to be on one core,
// they may stay there for longer than a step takes, as neither sleeps while it finds work: so the one that notices goes to
// another core.
struct Cores {
#if defined(__linux__)
    uint16_t last[CPU_SETSIZE];      // 1 + the thread that was last seen on a core
    uint16_t core[MOST_THREADS];     // 1 + the core that a thread was last seen on
    uint8_t tries[MOST_THREADS];     // of a thread to leave a core

    // Called by thread `index`, as often as it likes.
    void look(int index) {
        int here = sched_getcpu();
        if (!is_core(here) || (get(last[here]) == index + 1 && get(core[index]) == here + 1)) return;
        if (others(here, index) && tries[index] < MOST_TRIES) {
            ++tries[index];
            leave(index);
            here = sched_getcpu();
            if (!is_core(here)) return;
        }
        set(core[index], here + 1);
        set(last[here], index + 1);
    }

  private:
    static constexpr int MOST_TRIES = 4;    // in a region: where there is no core to go to, each one is lost time

    static bool is_core(int i) { return i >= 0 && i < CPU_SETSIZE; }
    static int get(const uint16_t& from) { return __atomic_load_n(&from, __ATOMIC_RELAXED); }
    static void set(uint16_t& to, int x) { __atomic_store_n(&to, (uint16_t)x, __ATOMIC_RELAXED); }

    // Whether another thread than `index` is on a core.
    bool others(int on, int index) const {
        const int thread = get(last[on]) - 1;
        return thread >= 0 && thread != index && get(core[thread]) == on + 1;
    }

    // Goes to a core that nobody is known to be on, if the thread may use one.
    void leave(int index) const {
        cpu_set_t allowed, open;
        if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
        CPU_ZERO(&open);
        for (int i = 0; i < CPU_SETSIZE; ++i)
            if (CPU_ISSET(i, &allowed) && !others(i, index)) CPU_SET(i, &open);
        if (CPU_COUNT(&open) && sched_setaffinity(0, sizeof open, &open) == 0) restore(allowed, open);
    }

    // Lets the thread use `allowed` again, unless somebody has just changed what it may use. A thread that was free to use
    // what its control group has is so again, whatever that will be.
    static void restore(const cpu_set_t& allowed, const cpu_set_t& open) {
        cpu_set_t now, all;
        if (sched_getaffinity(0, sizeof now, &now) == 0 && !CPU_EQUAL(&now, &open)) return;
        memset(&all, 0xff, sizeof all);
        const bool free = sched_setaffinity(0, sizeof all, &all) == 0 && sched_getaffinity(0, sizeof now, &now) == 0;
        if (!free || !CPU_EQUAL(&now, &allowed)) sched_setaffinity(0, sizeof allowed, &allowed);
    }
#else
    void look(int) {}
#endif
};

// Of a run of items, how many are taken, and in which stage: in later ones that is none. One number, so that a thread
// that comes late cannot take what belongs to a stage that it does not know of.
struct alignas(64) Counter {
    uint64_t taken;    // stage << 32 | items
};

// Calls run(first, last) for chunks of [0, items) until none is left, for thread `index` of n, of which each has a counter
// and a run of the items. Counters start at zero, stages rise. Returns how many items this thread has done; none of a
// stage that is over.
template <typename Run>
int64_t take_runs(Counter* counters, uint32_t stage, int index, int n, int64_t items, int64_t chunk, const Run& run) {
    int64_t done = 0;
    for (int i = 0; i < n; ++i) {
        const int owner = index + i < n ? index + i : index + i - n;
        const int64_t begin = items * owner / n, count = items * (owner + 1) / n - begin;
        uint64_t seen = __atomic_load_n(&counters[owner].taken, __ATOMIC_RELAXED);
        for (;;) {
            const uint32_t of = (uint32_t)(seen >> 32);
            if (of > stage) return done;
            const int64_t first = of == stage ? (uint32_t)seen : 0, last = first + chunk < count ? first + chunk : count;
            if (first >= count) break;
            const uint64_t taken = (uint64_t)stage << 32 | (uint64_t)last;
            if (!__atomic_compare_exchange_n(&counters[owner].taken, &seen, taken, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
                continue;
            run(begin + first, begin + last);
            done += last - first;
            seen = __atomic_load_n(&counters[owner].taken, __ATOMIC_RELAXED);
        }
    }
    return done;
}

// What the threads of a region share. Starts as zeros.
struct Team {
    static constexpr int MOST = MOST_THREADS;
    Cores cores;
    alignas(64) int64_t done;     // items of the present stage
    alignas(64) uint32_t phase;   // the present stage
    alignas(64) int sleepers;
    Counter counters[MOST];
};

// One thread's place in its team.
class TeamThread {
  public:
    const int index, n;

    TeamThread(Team& team, int index, int n) : index(index), n(n), team_(team), stage_(0) {}

    // Calls run(first, last) for chunks of [0, items), and after() once all of them are done; then the next stage begins.
    // All threads call it alike; `items` may change only once the stage is over. One that comes when the stage is over goes on at once, and has called nothing.
    //
    // Everything that any thread wrote in a stage is seen in the next one. A thread that waits for the end of the stage calls
    // meanwhile() as long as it spins, which takes no longer than a pause.
    template <typename Run, typename After, typename Meanwhile>
    void stage(int64_t items, int64_t chunk, const Run& run, const After& after, const Meanwhile& meanwhile) {
        const uint32_t now = stage_++;
        team_.cores.look(index);
        if (__atomic_load_n(&team_.phase, __ATOMIC_ACQUIRE) != now) return;
        const int64_t all = items ? items : 1;    // who ends a stage of nothing takes nothing
        const int64_t mine = take_runs(team_.counters, now, index, n, all, chunk, [&](int64_t first, int64_t last) {
            if (items) run(first, last);
        });
        if (!mine || __atomic_add_fetch(&team_.done, mine, __ATOMIC_ACQ_REL) != all) return wait(now, meanwhile);
        after();
        team_.done = 0;
        __atomic_store_n(&team_.phase, now + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&team_.sleepers, __ATOMIC_SEQ_CST)) wake();
    }

    template <typename Run>
    void stage(int64_t items, int64_t chunk, const Run& run) {
        stage(items, chunk, run, [] {}, pause_briefly);
    }

  private:
    Team& team_;
    uint32_t stage_;

    template <typename Meanwhile>
    void wait(uint32_t now, const Meanwhile& meanwhile) {
        for (int i = 0; i < SPINS; ++i) {
            if (__atomic_load_n(&team_.phase, __ATOMIC_ACQUIRE) != now) return;
            meanwhile();
        }
        for (int i = 0; i < OFFERS; ++i) {
            if (__atomic_load_n(&team_.phase, __ATOMIC_ACQUIRE) != now) return;
            sched_yield();
        }
        __atomic_add_fetch(&team_.sleepers, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&team_.phase, __ATOMIC_ACQUIRE) == now) sleep(now);
        __atomic_sub_fetch(&team_.sleepers, 1, __ATOMIC_SEQ_CST);
    }

#if defined(__linux__)
    void sleep(uint32_t phase) { syscall(SYS_futex, &team_.phase, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &team_.phase, FUTEX_WAKE_PRIVATE, n, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t) { sched_yield(); }
    void wake() {}
#endif
};

}  // namespace
