// What every kernel file on the CPU includes; parsing it takes more than half of the time of a build.
#include <stddef.h>

#include "shim.h"
