// Threads.

#pragma once
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "op.h"

namespace {

// Helpers that take parts of an operation while its owner does the same: nobody waits for a helper that does not run.
// A ticket says which operation it is, how many parts it has and how many are taken; who raises it has the next part.
class Crew {
public:
    void run(int workers, int parts, void (*job)(const Op&, int, int), const Op& op) {
        std::unique_lock<std::mutex> mine(owner_, std::try_to_lock);
        if (workers <= 1 || parts <= 1 || !mine.owns_lock()) return job(op, 0, 1);  // another thread has the helpers
        while (made_ < workers - 1) hire();
        job_ = job, op_ = &op;
        done_.store(0, std::memory_order_relaxed);
        uint64_t number = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
        uint64_t next = number << 32 | static_cast<uint64_t>(parts) << 16;
        {
            std::lock_guard<std::mutex> held(lock_);
            ticket_.store(next, std::memory_order_seq_cst);
        }
        if (asleep_.load(std::memory_order_seq_cst)) wake_.notify_all();
        while (take()) {}
        while (done_.load(std::memory_order_acquire) < parts) relax();
    }

private:
    static constexpr int SPINS = 4000;
    static bool open(uint64_t ticket) { return (ticket & 0xffff) < (ticket >> 16 & 0xffff); }
    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    bool take() {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (open(ticket)) {
            auto job = job_.load(std::memory_order_relaxed);
            const Op* op = op_.load(std::memory_order_relaxed);
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
            job(*op, static_cast<int>(ticket & 0xffff), static_cast<int>(ticket >> 16 & 0xffff));
            done_.fetch_add(1, std::memory_order_release);
            return true;
        }
        return false;
    }
    void hire() {
        std::thread([this] {
            for (;;) {
                int spins = 0;
                while (!open(ticket_.load(std::memory_order_acquire)) && spins < SPINS) relax(), spins++;
                if (spins == SPINS) {
                    std::unique_lock<std::mutex> held(lock_);
                    asleep_.fetch_add(1, std::memory_order_seq_cst);
                    wake_.wait(held, [&] { return open(ticket_.load(std::memory_order_seq_cst)); });
                    asleep_.fetch_sub(1, std::memory_order_seq_cst);
                }
                take();
            }
        }).detach();
        made_++;
    }
    std::mutex owner_, lock_;
    std::condition_variable wake_;
    std::atomic<uint64_t> ticket_{0};
    std::atomic<int> done_{0}, asleep_{0};
    std::atomic<void (*)(const Op&, int, int)> job_{nullptr};
    std::atomic<const Op*> op_{nullptr};
    int made_ = 0;
};

Crew* crew = new Crew;  // its threads outlive what would take it down

// A child of fork has no helpers.
[[maybe_unused]] const int renewed = pthread_atfork(nullptr, nullptr, [] { crew = new Crew; });

}  // namespace
