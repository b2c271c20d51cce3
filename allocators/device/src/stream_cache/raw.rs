//! The blocks of a cache that were released as raw addresses.

use super::{RawBlock, RawToken, StreamCache, free::FreeFollowUp};
use crate::{Request, base::extent::LazyBox};
use aquifer_core::{MemoryError, Result};
use aquifer_formats::HeldBlock;
use aquifer_stream::UseList;
use std::{any::Any, sync::Arc};

impl StreamCache {
    /// Allocates a block from the cache, if it has room, and returns its address. The fast path
    /// without listeners.
    #[inline]
    pub(crate) fn fast_alloc_raw(&'static self, request: &Request) -> Option<u64> {
        self.with_unflushed(|s| {
            let token = *s.allocate_token(self, request)?;
            let address = token.extent.address;
            let raw = RawToken { token, uses: UseList::new(), meta: LazyBox::NONE };
            let before = s.raw.insert(address, RawBlock::Unique(raw));
            debug_assert!(before.is_none(), "two raw blocks at one address");
            s.record_raw(address);
            Some(address)
        })
    }

    /// Returns the raw blocks of this cache.
    pub(crate) fn raw_blocks(&'static self) -> Vec<HeldBlock> {
        let stream = self.timeline().number();
        let to_held = |(&address, raw): (&u64, &RawBlock)| {
            let request = match raw {
                RawBlock::Unique(token) => token.token.extent.request,
                RawBlock::Shared { request, .. } => *request,
            };
            HeldBlock { address, bytes: request.bytes(), stream, tag: request.tag(), at: None }
        };
        // The list is allocated before the lock is taken. It may grow under the lock if blocks were
        // added since.
        let mut blocks = Vec::with_capacity(self.with(|s| s.raw.len()));
        self.with(|s| blocks.extend(s.raw.iter().map(to_held)));
        blocks
    }

    /// Stores the contents of a token while its address is released.
    pub(crate) fn insert_raw(&self, address: u64, token: RawToken) {
        self.with_unflushed(|s| {
            let before = s.raw.insert(address, RawBlock::Unique(token));
            debug_assert!(before.is_none(), "two raw blocks at one address");
            s.record_raw(address);
        });
    }

    /// Removes and returns the raw block at `address`, made by `make` unless it was shared; `None`
    /// if this cache has none.
    pub(crate) fn take_raw<B: Any + Send + Sync>(
        &self,
        address: u64,
        make: impl FnOnce(RawToken) -> B,
    ) -> Option<Result<B>> {
        self.with_unflushed(|s| {
            let (block, request) = match s.raw.remove(&address)? {
                RawBlock::Unique(token) => return Some(Ok(make(token))),
                RawBlock::Shared { block, request } => (block, request),
            };
            // References are cloned only under this lock, so a unique one stays unique.
            let unique = block.downcast::<B>().and_then(|block| {
                Arc::try_unwrap(block).map_err(|shared| shared as Arc<dyn Any + Send + Sync>)
            });
            Some(unique.map_err(|block| {
                s.raw.insert(address, RawBlock::Shared { block, request });
                MemoryError::Busy { address }
            }))
        })
    }

    /// Returns the raw block at `address`, which stays raw, made by `make` if it was not shared
    /// before; `None` if this cache has none.
    pub(crate) fn share_raw<B: Any + Send + Sync>(
        &self,
        address: u64,
        make: impl FnOnce(RawToken) -> B,
    ) -> Option<Arc<B>> {
        self.with_unflushed(|s| {
            if let RawBlock::Shared { block, .. } = s.raw.get(&address)? {
                return block.clone().downcast().ok();
            }
            let RawBlock::Unique(token) = s.raw.remove(&address)? else { return None };
            let request = token.token.extent.request;
            let block = Arc::new(make(token));
            s.raw.insert(address, RawBlock::Shared { block: block.clone(), request });
            Some(block)
        })
    }

    /// Frees the raw block at `address`; `None` if this cache has none.
    pub(crate) fn free_raw(&'static self, address: u64) -> Option<()> {
        /// What remains to be done after the lock is released.
        enum FreeStep {
            After(Option<Box<FreeFollowUp>>),
            Token(RawToken),
            Shared(Arc<dyn Any + Send + Sync>),
        }
        let rest = self.with_unflushed(|s| {
            Some(match s.raw.remove(&address)? {
                RawBlock::Unique(mut raw) => {
                    if raw.uses.is_empty() && raw.meta.is_none() {
                        FreeStep::After(s.deallocate(&raw.token.cache_ref, &raw.token.extent))
                    } else {
                        FreeStep::Token(raw)
                    }
                }
                RawBlock::Shared { block, .. } => FreeStep::Shared(block),
            })
        })?;
        match rest {
            FreeStep::After(after) => self.follow_up(after),
            FreeStep::Token(RawToken { token, mut uses, meta }) => {
                self.deallocate_with_meta(token, &mut uses, meta);
            }
            FreeStep::Shared(block) => drop(block),
        }
        Some(())
    }
}
