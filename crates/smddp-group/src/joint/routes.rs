//! Routing of a call's channels: through shared memory to ranks of this node, over the wire to ranks of other nodes, or both.

use std::sync::Arc;

use smddp_base::{Channels, RecvChannel, SendChannel};

use crate::layout::RemoteLayout;

/// Location of each rank of a group, seen from this rank.
#[derive(Debug)]
pub struct Routes {
    pub(super) me: usize,
    /// Node index of each rank of this node; `None` for ranks of other nodes.
    local: Vec<Option<usize>>,
    /// Ranks of this node, ascending.
    ranks: Vec<usize>,
    /// The transport between nodes keeps a copy of the data that is sent.
    copies: bool,
}

impl Routes {
    /// Creates the routes of a group whose ranks are all on one node.
    pub fn local(me: usize, size: usize) -> Self {
        Self::new(me, size, (0..size).collect(), false)
    }

    pub(super) fn new(me: usize, size: usize, ranks: Vec<usize>, copies: bool) -> Self {
        let mut local = vec![None; size];
        for (index, &rank) in ranks.iter().enumerate() {
            local[rank] = Some(index);
        }
        Self { me, local, ranks, copies }
    }

    /// Returns the index of a rank among the ranks of this node; `None` for a rank of another node.
    pub(crate) fn local_index(&self, rank: usize) -> Option<usize> {
        self.local.get(rank).copied().flatten()
    }

    pub(super) fn places(&self) -> Vec<Option<usize>> {
        self.local.clone()
    }

    pub(super) fn rank(&self, local: usize) -> usize {
        self.ranks.get(local).copied().unwrap_or(local)
    }

    pub(super) fn size(&self) -> usize {
        self.local.len()
    }

    /// Returns the ranks of other nodes.
    pub(super) fn remote_ranks(&self) -> Vec<usize> {
        (0..self.size()).filter(|&rank| self.local[rank].is_none()).collect()
    }

    /// Routes the channels of a call. Done once, when the call is bound.
    pub fn route(&self, channel_layout: &Arc<Channels>) -> RoutedChannels {
        if self.ranks.len() == self.size() {
            return RoutedChannels { local: channel_layout.clone(), remote: None, unannounced: false };
        }
        let mut local = Channels { depth: channel_layout.depth, ..Channels::default() };
        let (mut sends, mut recvs) = (Vec::new(), Vec::new());
        let (mut remote_sends, mut remote_recvs) = (Vec::new(), Vec::new());
        for (channel, send_channel) in channel_layout.send_channels.iter().enumerate() {
            let remote: Vec<usize> =
                send_channel.readers.iter().copied().filter(|&r| self.local[r].is_none()).collect();
            let shm = remote.len() < send_channel.readers.len();
            // A reader finds its line by its index among all readers, including those of other nodes.
            let readers = send_channel.readers.iter().map(|&r| self.local[r].unwrap_or(SendChannel::REMOTE));
            local.send_channels.push(if shm {
                SendChannel { readers: readers.collect(), ..send_channel.clone() }
            } else {
                SendChannel { readers: Vec::new(), slot_bytes: 0, messages: 0, bytes: 0 }
            });
            let net = (!remote.is_empty()).then_some(remote_sends.len());
            if net.is_some() {
                remote_sends.push((channel, SendChannel { readers: remote, ..send_channel.clone() }));
            }
            sends.push(SendRoute { shm, net });
        }
        for recv_channel in &channel_layout.recv_channels {
            recvs.push(match self.local[recv_channel.rank] {
                Some(rank) => {
                    local.recv_channels.push(RecvChannel { rank, ..*recv_channel });
                    RecvRoute::Local(local.recv_channels.len() - 1)
                }
                None => {
                    remote_recvs.push(*recv_channel);
                    RecvRoute::Remote(remote_recvs.len() - 1)
                }
            });
        }
        // If the wire copies data in flight, a writer needs slots for its own work only.
        let written = if self.copies {
            channel_layout.window.min(channel_layout.depth.0)
        } else {
            channel_layout.window
        };
        let net =
            Arc::new(RemoteLayout::new(self.me, remote_sends, &remote_recvs, channel_layout.window, written));
        let remote = Some(Arc::new(ChannelRoutes { sends, recvs, net, direct: self.copies }));
        RoutedChannels { local: Arc::new(local), remote, unannounced: false }
    }
}

#[derive(Clone, Copy)]
pub(super) enum RecvRoute {
    Local(usize),
    Remote(usize),
}

#[derive(Clone, Copy)]
pub(super) struct SendRoute {
    pub(super) shm: bool,
    pub(super) net: Option<usize>,
}

/// Routes of a call's channels in a group that spans nodes.
#[derive(Default)]
pub(super) struct ChannelRoutes {
    pub(super) sends: Vec<SendRoute>,
    pub(super) recvs: Vec<RecvRoute>,
    pub(super) net: Arc<RemoteLayout>,
    /// The wire can send from any memory and receive into any memory.
    direct: bool,
}

/// Channels of a call with their routes. Stored in the bound call.
#[derive(Clone, Default)]
pub struct RoutedChannels {
    /// Channels on this node, with ranks as node indices. Channels keep their numbers; those without a reader here are empty.
    pub(super) local: Arc<Channels>,
    pub(super) remote: Option<Arc<ChannelRoutes>>,
    /// Replies to straggler queries omit that this rank has begun this call.
    pub(super) unannounced: bool,
}

impl RoutedChannels {
    /// Returns the same routes for a call that only ends this rank's part in the group. To the other ranks, this rank has not begun
    /// their next call.
    #[must_use]
    pub fn unannounced(self) -> Self {
        Self { unannounced: true, ..self }
    }

    /// Returns true if the messages of a send channel can be sent from the call's memory. This requires that all its readers are on
    /// other nodes, and that the wire can send from any memory.
    pub fn sends_in_place(&self, channel: usize) -> bool {
        let routes = self.remote.as_ref().filter(|routes| routes.direct);
        routes.is_some_and(|routes| matches!(routes.sends[channel], SendRoute { shm: false, net: Some(_) }))
    }

    /// Returns true if a send channel may have a zero-copy source: all its readers map this process's memory.
    pub fn may_be_source(&self, channel: usize) -> bool {
        let local =
            |routes: &Arc<ChannelRoutes>| matches!(routes.sends[channel], SendRoute { shm: true, net: None });
        !self.local.inline && self.remote.as_ref().is_none_or(local)
    }

    /// Returns true if this rank may read a receive channel from its writer's own memory into a target: the writer is on this node.
    pub fn may_be_target(&self, recv_channel: usize) -> bool {
        let local = |routes: &Arc<ChannelRoutes>| matches!(routes.recvs[recv_channel], RecvRoute::Local(_));
        !self.local.inline && self.remote.as_ref().is_none_or(local)
    }

    /// Returns true if the messages of a receive channel can arrive in the call's memory.
    pub fn receives_in_place(&self, recv_channel: usize) -> bool {
        let routes = self.remote.as_ref().filter(|routes| routes.direct);
        routes.is_some_and(|routes| matches!(routes.recvs[recv_channel], RecvRoute::Remote(_)))
    }
}

impl std::fmt::Debug for RoutedChannels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.remote.is_some() {
            "RoutedChannels(local, remote)"
        } else {
            "RoutedChannels(local)"
        })
    }
}
