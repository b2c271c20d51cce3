//! Tests of what a process has once: its tags, all of which get used up, and the thread that wakes
//! tasks, which is counted.
//!
//! They form a separate process, in which nothing else names tags or waits.

mod tags;
mod wake;
