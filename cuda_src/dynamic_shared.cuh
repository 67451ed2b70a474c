// Shared memory, whose size the launch decides; the tests that run on the host have a definition of their own.
#pragma once

#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif
