// Says which build a library is, so that nothing else is taken for it.

#ifndef TWINPOOL_BUILD_KEY
#define TWINPOOL_BUILD_KEY ""
#endif

extern "C" {
extern const char twinpool_build_key[];
const char twinpool_build_key[] = TWINPOOL_BUILD_KEY;
}
