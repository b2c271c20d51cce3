//= 10 errors
//~ the trait `Driver` requires an `unsafe impl` declaration
//~ the trait `Devices` requires an `unsafe impl` declaration
//~ the trait `Streams` requires an `unsafe impl` declaration
//~ the trait `Events` requires an `unsafe impl` declaration
//~ the trait `Graphs` requires an `unsafe impl` declaration
//~ the trait `Memory` requires an `unsafe impl` declaration
//~ the trait `Physical` requires an `unsafe impl` declaration
//~ the trait `Ipc` requires an `unsafe impl` declaration
//~ the trait `HostMemory` requires an `unsafe impl` declaration
//~ the trait `Copies` requires an `unsafe impl` declaration
use aquifer_driver::{
    Copies, Devices, Driver, Events, Graphs, HostMemory, Ipc, Memory, Physical, Streams,
};

#[derive(Debug)]
pub struct Lies;

impl Driver for Lies {}
impl Devices for Lies {}
impl Streams for Lies {}
impl Events for Lies {}
impl Graphs for Lies {}
impl Memory for Lies {}
impl Physical for Lies {}
impl Ipc for Lies {}
impl HostMemory for Lies {}
impl Copies for Lies {}

fn main() {}
