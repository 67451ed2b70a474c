// What the sanitizers are told of the fibers that a block's threads are. Nothing, where the build has no sanitizer.
#pragma once

#include <cstddef>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef LT_SANITIZE_THREAD
#include <sanitizer/tsan_interface.h>
#endif

namespace shim {

#ifdef __SANITIZE_ADDRESS__
// AddressSanitizer has to know on which stack the program is.
inline void leave(void** fake_stack, const void* stack, std::size_t size) {
  __sanitizer_start_switch_fiber(fake_stack, stack, size);
}
inline void arrive(void* fake_stack, const void** stack, std::size_t* size) {
  __sanitizer_finish_switch_fiber(fake_stack, stack, size);
}
// A fiber given up while it waits leaves marks on its stack.
inline void clean(void* stack, std::size_t size) { __asan_unpoison_memory_region(stack, size); }
#else
inline void leave(void**, const void*, std::size_t) {}
inline void arrive(void*, const void**, std::size_t*) {}
inline void clean(void*, std::size_t) {}
#endif

#ifdef LT_SANITIZE_THREAD
// To ThreadSanitizer each fiber is a thread. A switch orders nothing: what a fiber does before it releases a place comes
// before what another does after acquiring that place, and nothing else does.
inline void* new_thread() { return __tsan_create_fiber(0); }
inline void* this_thread() { return __tsan_get_current_fiber(); }
inline void end_thread(void* thread) { __tsan_destroy_fiber(thread); }
inline void switch_to_thread(void* thread) { __tsan_switch_to_fiber(thread, __tsan_switch_to_fiber_no_sync); }
inline void release(char& place) { __tsan_release(&place); }
inline void acquire(char& place) { __tsan_acquire(&place); }
#else
inline void* new_thread() { return nullptr; }
inline void* this_thread() { return nullptr; }
inline void end_thread(void*) {}
inline void switch_to_thread(void*) {}
inline void release(char&) {}
inline void acquire(char&) {}
#endif

}  // namespace shim
