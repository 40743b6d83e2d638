// Threads of one call: started for it, or lent by a framework, and out of its work before it returns.
#pragma once
#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstdint>
#include <memory>
#include <system_error>
#include <thread>

#if !defined(_WIN32)
#include <dlfcn.h>
#include <unistd.h>
#endif

namespace gradclip {

constexpr int64_t SERIAL = 2 << 20;    // bytes below which starting a thread costs more than it saves
constexpr int64_t GRAIN = 256 << 10;   // bytes that a thread takes at a time

// A program may round differently or flush subnormals to zero; the kernels do neither.
class DefaultFloats {
    std::fenv_t was;

public:
    DefaultFloats() { std::fegetenv(&was), std::fesetenv(FE_DFL_ENV); }
    ~DefaultFloats() { std::fesetenv(&was); }
};

// What the threads of a call share. It outlives the call for a thread that gets a CPU only after the
// work is done: nobody waits for that one, it finds no job left and ends.
struct Jobs {
    const int64_t count, grain;
    std::atomic<int64_t> next{0};
    std::atomic<int> inside{0};

    Jobs(int64_t count, int64_t grain) : count(count), grain(grain) {}

    template <class Work>
    void run(const Work* work) {
        DefaultFloats floats;
        inside++;
        for (int64_t first; (first = next.fetch_add(grain)) < count;)
            for (int64_t job = first; job < first + grain && job < count; job++) (*work)(job);
        inside--;
    }
};

// Hands a function and its argument to so many threads, and waits for all of them: OpenMP's own entry
// point, found where a framework has brought an OpenMP. Its threads keep their cores busy for a while
// after each of its loops, and one of ours would find none; given work they begin at once.
using Team = void (*)(void (*)(void*), void*, unsigned, unsigned);

struct Threads {
    int most;
    Team team;   // null: threads of our own
};

// After a fork the child has none of its parent's team.
inline bool in_process_of_birth() {
#if defined(_WIN32)
    return true;
#else
    static const pid_t birth = getpid();
    return getpid() == birth;
#endif
}

inline Team find_team() {
#if defined(_WIN32)
    return nullptr;
#else
    return (Team)dlsym(RTLD_DEFAULT, "GOMP_parallel");
#endif
}

template <class Work>
void share(Team team, int64_t threads, Jobs& jobs, const Work& work) {
    const auto run = [&] { jobs.run(&work); };
    team([](void* run_) { (*(decltype(run)*)run_)(); }, (void*)&run, (unsigned)threads, 0);
}

// Calls work(job) for every job in [0, count), which together touch `bytes`.
template <class Work>
void parallel(Threads threads, int64_t bytes, int64_t count, const Work& work) {
    const int64_t grain = bytes > 0 ? count * GRAIN / bytes + 1 : 1;
    const int64_t useful = bytes < SERIAL ? 1 : std::min((int64_t)threads.most, (count + grain - 1) / grain);
    const auto jobs = std::make_shared<Jobs>(count, grain);
    if (useful > 1 && threads.team && in_process_of_birth()) return share(threads.team, useful, *jobs, work);
    try {
        for (int64_t t = 1; t < useful; t++) std::thread([jobs, &work] { jobs->run(&work); }).detach();
    } catch (const std::system_error&) {
        // No more threads to be had: those there are do the work.
    }
    jobs->run(&work);
    while (jobs->inside) std::this_thread::yield();
}

}  // namespace gradclip
