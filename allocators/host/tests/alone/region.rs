//! A test of the addresses that a released region leaves. Beside other tests, the next region may
//! already be there.

use crate::{
    alone,
    support::{self, MIB},
};
use aquifer_core::Budget;
use aquifer_host::region::{Cause, PinnedBy, Region, RegionRequest, window};

#[test]
fn a_region_is_charged_populated_zeroed_ours_and_goes_without_trace() {
    let _alone = alone();
    let (host, budget) = (support::host(), Budget::new("pinned", 64 * MIB as u64));
    let mut request = RegionRequest::bytes(5 * MIB + 1);
    request.piece = 2 * MIB;
    let mut region = Region::new(&host, &budget, &request).unwrap();
    let span = region.span();
    assert_eq!(span.len, 5 * MIB + 4096, "whole base pages");
    assert_eq!((budget.used(), region.report().bytes), (span.len as u64, span.len as u64));
    assert_eq!(
        support::present(span),
        span.len / 4096,
        "every page is there before anybody touches it"
    );
    let window = window::bounds().unwrap();
    assert!(window.contains(&span.start) && window.contains(&(span.end() - 1)));
    assert!(region.bytes().iter().all(|&b| b == 0));
    region.bytes_mut().fill(7);
    let report = region.report().clone();
    assert_eq!(report.pinned_by, PinnedBy::Nobody);
    assert_eq!(report.shortfalls.iter().filter(|cause| **cause == Cause::NoDriver).count(), 1);
    assert!(!region.is_pinned() && region.registrations().is_empty());
    region.close().unwrap();
    assert_eq!((budget.used(), support::present(span)), (0, 0));
}
