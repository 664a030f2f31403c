// Checks of team.h by itself: `team late`, `team cores` and `team stress THREADS STAGES SEED`. Exits with 1 and says what is wrong.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "team.h"

namespace {

int wrong(const char* what, long stage) {
    std::printf("%s in stage %ld\n", what, stage);
    std::exit(1);
}

// A thread that has no core from stage `FROM` on, until the other one is through, holds nobody up; what is over when it comes
// back it does not do again.
void late() {
    constexpr int STAGES = 1000, FROM = 3, ITEMS = 7;
    static Team team;
    std::atomic<bool> through{false};
    std::atomic<int> done[STAGES] = {}, ended[STAGES] = {};
    const auto walk = [&](int index) {
        TeamThread thread(team, index, 2);
        for (int s = 0; s < STAGES; ++s) {
            while (index == 1 && s == FROM && !through) std::this_thread::yield();
            thread.stage(ITEMS, 2, [&](int64_t first, int64_t last) { done[s] += (int)(last - first); },
                         [&] { ended[s] += 1; }, pause_briefly);
        }
        through = true;
    };
    std::thread second(walk, 1);
    walk(0);
    second.join();
    for (int s = 0; s < STAGES; ++s)
        if (done[s] != ITEMS || ended[s] != 1) wrong("not done once", s);
}

// Threads that are held up anywhere: every item is done once, after everything of the stage before. Plain memory carries what
// one stage leaves for the next, so that a thread sanitizer sees an order that is missing.
void stress(int n, int stages, unsigned seed) {
    constexpr int MOST = 37;
    static Team team;
    std::vector<std::vector<long>> values(stages + 1, std::vector<long>(MOST, 0));
    std::vector<long> sums(stages + 1, 0);
    std::vector<int> ended(stages + 1, 0);
    const auto items = [&](int s) { return (int)((s * 7919u + seed) % (MOST + 1)); };    // 0 as well
    // Of stages by turns, as one who comes late sees the numbers of later ones: a stage's own stay until it is over.
    std::atomic<int> sizes[3] = {{items(0)}, {items(1)}, {0}};
    const auto walk = [&](int index) {
        std::mt19937 random(seed * 31 + index);
        const auto hold = [&] {
            const unsigned kind = random() % 64;
            for (unsigned i = 0; kind < 3 && i < random() % 50; ++i) std::this_thread::yield();
        };
        TeamThread thread(team, index, n);
        for (int s = 0; s < stages; ++s) {
            const int n_items = sizes[s % 3].load(std::memory_order_acquire);
            hold();
            thread.stage(n_items, 1 + s % 4,
                         [&](int64_t first, int64_t last) {
                             hold();
                             for (int64_t i = first; i < last; ++i) values[s][i] += sums[s] + i + 1;
                         },
                         [&] {
                             long sum = 0;
                             for (int i = 0; i < items(s); ++i) sum += values[s][i] - sums[s];
                             sums[s + 1] = sum;
                             ended[s] += 1;
                             sizes[(s + 2) % 3].store(items(s + 2), std::memory_order_release);
                         },
                         [&] {});
        }
    };
    std::vector<std::thread> others;
    for (int i = 1; i < n; ++i) others.emplace_back(walk, i);
    walk(0);
    for (std::thread& t : others) t.join();
    for (int s = 0; s < stages; ++s)
        for (int i = 0; i < MOST; ++i)
            if (ended[s] != 1 || values[s][i] != (i < items(s) ? sums[s] + i + 1 : 0)) wrong("not done once", s);
}

void move_to(int core) {
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(core, &only);
    sched_setaffinity(0, sizeof only, &only);
}

// A thread that is on a core with another one leaves it, if it may use another, and may use afterwards what it might before.
void cores() {
    cpu_set_t allowed, left;
    sched_getaffinity(0, sizeof allowed, &allowed);
    Cores known = {};
    for (int turn = 0; turn < 3; ++turn)
        for (int core = 0; core < CPU_SETSIZE; ++core)
            if (CPU_ISSET(core, &allowed)) {
                move_to(core);
                known.look(0);
                if (known.core[0] != core + 1) wrong("it is not where it is said to be", core);
            }
    sched_setaffinity(0, sizeof allowed, &allowed);
    for (long round = 0; round < 200; ++round) {
        Cores cores = {};
        const int core = sched_getcpu();
        move_to(core);
        for (int i = 0; i < 2; ++i) cores.look(0);
        if (sched_getcpu() != core || cores.tries[0]) wrong("nobody was there, and it wanted to leave", round);
        if (CPU_COUNT(&allowed) > 1) {
            std::thread([&] {
                cpu_set_t mine;
                sched_setaffinity(0, sizeof allowed, &allowed);
                cores.look(1);
                sched_getaffinity(0, sizeof mine, &mine);
                if (!CPU_EQUAL(&mine, &allowed)) wrong("a core is lost", round);
                if (cores.core[1] == cores.core[0]) wrong("it stayed where somebody was", round);
            }).join();
        }
        for (int i = 0; i < 100; ++i) cores.look(2 + i % 2);
        if (sched_getcpu() != core) wrong("there was nowhere to go", round);
        if (cores.tries[2] > 4 || cores.tries[3] > 4) wrong("it went on trying", round);
        sched_setaffinity(0, sizeof allowed, &allowed);
        sched_getaffinity(0, sizeof left, &left);
        if (!CPU_EQUAL(&left, &allowed)) wrong("a core is lost", round);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc == 5)
        stress(std::atoi(argv[2]), std::atoi(argv[3]), (unsigned)std::atoi(argv[4]));
    else if (std::string(argv[1]) == "cores")
        cores();
    else
        late();
    std::puts("right");
}
