// A second file of a program that includes the header: it defines nothing twice.
#include <aquifer.hpp>

aquifer::pinned_block also(aquifer::runtime_view rt) { return aquifer::pinned_block(rt, 0, 100); }
