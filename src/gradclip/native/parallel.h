// Threads of one call: started for it, out of its work before it returns. No pool, so fork needs no code.
#pragma once
#include <atomic>
#include <cfenv>
#include <cstdint>
#include <memory>
#include <system_error>
#include <thread>

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

// Calls work(job) for every job in [0, count), which together touch `bytes`.
template <class Work>
void parallel(int threads, int64_t bytes, int64_t count, const Work& work) {
    const int64_t grain = bytes > 0 ? count * GRAIN / bytes + 1 : 1;
    const auto jobs = std::make_shared<Jobs>(count, grain);
    try {
        for (int64_t t = 1; bytes >= SERIAL && t < threads && t * grain < count; t++)
            std::thread([jobs, &work] { jobs->run(&work); }).detach();
    } catch (const std::system_error&) {
        // No more threads to be had: those there are do the work.
    }
    jobs->run(&work);
    while (jobs->inside) std::this_thread::yield();
}

}  // namespace gradclip
