/* Ends by the debug exit with the value of `code=` (default 0). */
#include "runtime.h"

void guest(void) { debug_exit((u8)option("code", 0)); }
