import java.io.IOException;
import java.nio.charset.StandardCharsets;
import org.apache.bookkeeper.auth.AuthCallbacks.GenericCallback;
import org.apache.bookkeeper.auth.AuthToken;
import org.apache.bookkeeper.auth.BookieAuthProvider;
import org.apache.bookkeeper.auth.ClientAuthProvider;
import org.apache.bookkeeper.client.BKException.Code;
import org.apache.bookkeeper.conf.ClientConfiguration;
import org.apache.bookkeeper.conf.ServerConfiguration;
import org.apache.bookkeeper.proto.BookieConnectionPeer;
import org.apache.bookkeeper.proto.ClientConnectionPeer;

/**
 * Bindery's token authentication for Apache's client and bookie: one message with the token, one empty response.
 *
 * <p>The token is the property `interopToken` of the configuration. The plugin has Bindery's default name.
 */
public class TokenAuth {
    static final String PLUGIN = "bindery";
    static final String PROPERTY = "interopToken";

    /** The class for the setting `clientAuthProviderFactoryClass`. */
    public static class Client implements ClientAuthProvider.Factory {
        private byte[] token;

        @Override
        public void init(ClientConfiguration conf) throws IOException {
            token = conf.getString(PROPERTY).getBytes(StandardCharsets.UTF_8);
        }

        @Override
        public ClientAuthProvider newProvider(ClientConnectionPeer peer, GenericCallback<Void> complete) {
            return new ClientAuthProvider() {
                @Override
                public void init(GenericCallback<AuthToken> send) {
                    send.operationComplete(Code.OK, AuthToken.wrap(token));
                }

                @Override
                public void process(AuthToken answer, GenericCallback<AuthToken> send) {
                    complete.operationComplete(Code.OK, null);
                }
            };
        }

        @Override
        public String getPluginName() {
            return PLUGIN;
        }
    }

    /** The class for the setting `bookieAuthProviderFactoryClass`. */
    public static class Bookie implements BookieAuthProvider.Factory {
        private String token;

        @Override
        public void init(ServerConfiguration conf) throws IOException {
            token = conf.getString(PROPERTY);
        }

        @Override
        public BookieAuthProvider newProvider(BookieConnectionPeer peer, GenericCallback<Void> complete) {
            return (presented, send) -> {
                if (token.equals(new String(presented.getData(), StandardCharsets.UTF_8))) {
                    send.operationComplete(Code.OK, AuthToken.NULL);
                    complete.operationComplete(Code.OK, null);
                } else {
                    send.operationComplete(Code.UnauthorizedAccessException, null);
                }
            };
        }

        @Override
        public String getPluginName() {
            return PLUGIN;
        }
    }
}
