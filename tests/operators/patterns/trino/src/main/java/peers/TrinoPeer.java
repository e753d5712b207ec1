package peers;

import io.trino.testing.LocalQueryRunner;
import io.trino.testing.MaterializedResult;
import io.trino.testing.MaterializedRow;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import static io.trino.testing.TestingSession.testSessionBuilder;

/** Answers queries: one a line on standard input, its rows as a line of text on standard output. */
public class TrinoPeer {
  public static void main(String[] arguments) throws Exception {
    try (LocalQueryRunner runner = LocalQueryRunner.create(testSessionBuilder().build())) {
      BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
      String line;
      while ((line = in.readLine()) != null) {
        StringBuilder out = new StringBuilder("rows:");
        try {
          MaterializedResult result = runner.execute(line);
          for (MaterializedRow row : result.getMaterializedRows()) out.append(row.getFields()).append(';');
        } catch (RuntimeException e) {
          out = new StringBuilder("error:" + String.valueOf(e.getMessage()).replace('\n', ' '));
        }
        System.out.println(out);
        System.out.flush();
      }
    }
    System.exit(0);
  }
}
